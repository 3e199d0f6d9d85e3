"""Prompts and a decode step in one forward: on a node that does both, every output is what it would be alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.protocol.sampling_params import SamplingParams
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, node_config, overlaps, unsplit, watch
from tests.modelzoo import random_prompt, reference_greedy

STREAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_new_tokens=32, temperature=1.0, seed=7, ignore_eos=True),
    "penalized": SamplingParams(
        max_new_tokens=32, temperature=0.0, frequency_penalty=0.7, presence_penalty=0.3, ignore_eos=True
    ),
}
LONG = 300
CHUNK = 24


@overlaps
@pytest.mark.parametrize("retract_every", [0, 5])
def test_a_long_prompt_beside_running_streams(
    zoo: Zoo, llama: Path, overlap: bool, retract_every: int
) -> None:
    prompts = zoo.prompts("llama")[: len(STREAMS)]
    config = node_config(
        llama, chunk=CHUNK, overlap=overlap, retract_every=retract_every, enable_mixed_chunk=True
    )
    long_prompt = random_prompt(LONG, seed=99)
    with unsplit(config) as cluster:
        launched = watch(cluster)
        client = Client(cluster)
        keys = [client.submit(ids, p) for ids, p in zip(prompts, STREAMS.values(), strict=True)]
        cluster.run(lambda: all(len(cluster.router.answers[key].token_ids) > 3 for key in keys))
        started = len(launched)
        before = [len(cluster.router.answers[key].token_ids) for key in keys]
        last = client.submit(long_prompt, msgspec.structs.replace(GREEDY, max_new_tokens=8))
        cluster.run(lambda: bool(cluster.router.answers[last].token_ids))
        during = [len(cluster.router.answers[key].token_ids) - n for key, n in zip(keys, before, strict=True)]
        num_chunks = -(-LONG // (CHUNK - len(STREAMS)))
        mixed = [batch for batch in launched[started:] if batch.extends and batch.decodes]
        assert all(batch.num_tokens <= CHUNK for batch in mixed)
        if not retract_every:
            assert len(mixed) >= num_chunks - 1
            assert min(during) >= num_chunks - 1, "the prompt has stalled a stream"
        cluster.run_all()
        cluster.assert_idle()
        for key, ids, params in zip(keys, prompts, STREAMS.values(), strict=True):
            assert cluster.tokens(key) == reference_tokens(zoo.folder("llama"), ids, params)
        assert cluster.tokens(last) == reference_greedy(zoo.folder("llama"), long_prompt, 8)
