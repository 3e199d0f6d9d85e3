"""The same path on a GPU: torch's own operations, the CUDA forward stream, transfers through pinned host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.protocol.logprobs import LogprobParams
from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import Client, node_config, split
from tests.modelzoo import random_prompt, reference_greedy, reference_logits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: the CUDA path is not tested"),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("retract_every", [0, 3])
def test_split_on_a_gpu_equals_reference(zoo: Zoo, llama: Path, overlap: bool, retract_every: int) -> None:
    config = node_config(llama, overlap=overlap, retract_every=retract_every)
    config = replace(config, model=replace(config.model, device="cuda"))
    prompts = [random_prompt(40 + 7 * i, seed=i) for i in range(8)]
    with split(config) as cluster:
        got = Client(cluster).tokens(prompts)
    assert got == [reference_greedy(llama, ids, 32) for ids in prompts]


@pytest.mark.parametrize("retract_every", [0, 3])
def test_penalties_and_logprobs_on_a_gpu(llama: Path, retract_every: int) -> None:
    """Beside requests that ask for nothing."""
    config = node_config(llama, retract_every=retract_every)
    config = replace(config, model=replace(config.model, device="cuda"))
    ids = random_prompt(50, seed=1)
    params = SamplingParams(
        max_new_tokens=16,
        temperature=0.0,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=(TokenBias(77, 6.0),),
        ignore_eos=True,
        logprobs=LogprobParams(start_len=10, top_num=4, token_ids=(3, 9)),
    )
    with split(config) as cluster:
        client = Client(cluster)
        client.submit(random_prompt(60, seed=2))
        key = client.submit(ids, params)
        cluster.run_all()
        answer = cluster.router.answers[key]
    tokens = reference_tokens(llama, ids, params)
    assert answer.token_ids == tokens
    expected = torch.log_softmax(reference_logits(llama, [*ids, *tokens]), dim=-1)
    found = [*(answer.input_logprobs or ()), *(answer.logprobs[i] for i in range(16))]
    all_ids = [*ids, *tokens]
    assert len(found) == len(all_ids) - 11
    for position, of_token in enumerate(found, start=10):
        of_all_V = expected[position]
        assert of_token.logprob == pytest.approx(of_all_V[all_ids[position + 1]].item(), abs=1e-3)
        assert [x for x, _ in of_token.top] == pytest.approx(of_all_V.topk(4).values.tolist(), abs=1e-3)
        assert of_token.of_token_ids == pytest.approx([of_all_V[3].item(), of_all_V[9].item()], abs=1e-3)
