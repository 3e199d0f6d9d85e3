"""In bf16, int8 (KV too) and with experts, natively: tokens of 1 prefill + 1 decode == of one node, one by one.

The KV and logits of a token are the same bits whatever the batch, the chunks, the page size and the prefix that was
there, and whether a decode step or a prefill computed them. So tokens and logprobs are the same too, also of requests
that are retracted and prefilled again, and of those that another node goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shared.config import NodeConfig
from shared.kernels.row_codes import split_codes
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import WindowedKVPool
from shared.protocol.logprobs import LogprobParams, TokenLogprobs
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster
from tests.golden.pairwise import pairwise
from tests.golden.references import Zoo
from tests.golden.serving import Client, node_config, split, unsplit

NUM_REQS = 12
P_PREFIX, D_PREFIX = 37, 53
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("native_kernels")


@dataclass(frozen=True)
class Case:
    model: str
    prefix: bool
    page_size: int
    chunk: int
    overlap: bool
    num_reqs: int
    mixed: bool
    retract_every: int

    def __str__(self) -> str:
        named = {
            "hit": self.prefix,
            "overlap": self.overlap,
            "mixed": self.mixed,
            "retract": self.retract_every,
        }
        flags = "".join(f"-{name}" for name, on in named.items() if on)
        return f"{self.model}-page{self.page_size}-chunk{self.chunk}-reqs{self.num_reqs}{flags}"


FACTORS: dict[str, tuple[object, ...]] = {
    "model": ("qwen3", "builtin", "qwen3-w8a8", "qwen3moe", "gptoss-mxfp4"),
    "prefix": (False, True),
    "page_size": (1, 16),
    "chunk": (23, 512),
    "overlap": (True, False),
    "num_reqs": (1, NUM_REQS),
    "mixed": (False, True),
    "retract_every": (0, 3),
}
CASES = [Case(*values) for values in pairwise(FACTORS)]  # type: ignore[arg-type]


def config_of(folder: Path, **options: object) -> NodeConfig:
    """With weights of W8A8, KV is int8 too."""
    config = node_config(folder, **options)  # type: ignore[arg-type]
    return replace(
        config,
        model=replace(config.model, dtype="bfloat16", attention_backend="native"),
        cache=replace(config.cache, kv_cache_dtype="int8" if folder.name.endswith("w8a8") else "auto"),
    )


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> dict[str, list[list[int]]]:
    """The tokens of each model's prompts, one at a time on one node."""
    found: dict[str, list[list[int]]] = {}
    for model in FACTORS["model"]:
        with unsplit(config_of(zoo.folder(str(model)), chunk=512, overlap=False)) as cluster:
            client = Client(cluster)
            found[str(model)] = [
                client.tokens([ids], PARAMS)[0] for ids in zoo.prompts(str(model))[:NUM_REQS]
            ]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_equals_one_node(zoo: Zoo, alone: dict[str, list[list[int]]], case: Case) -> None:
    config = config_of(
        zoo.folder(case.model),
        page_size=case.page_size,
        chunk=case.chunk,
        overlap=case.overlap,
        enable_mixed_chunk=case.mixed,
        retract_every=case.retract_every,
        retract_policy="recompute",
    )
    prompts = zoo.prompts(case.model)[: case.num_reqs]
    with split(config) as cluster:
        client = Client(cluster)
        if case.prefix:
            for ids in prompts:
                client.leave_prefix("p0", ids[:P_PREFIX])
                client.leave_prefix("d0", ids[:D_PREFIX])
        assert client.tokens(prompts, PARAMS) == alone[case.model][: case.num_reqs]
        count = cluster.nodes["d0"].scheduler.batcher.retraction.count
        assert bool(count.num_recompute) == bool(case.retract_every)


NUM_NEW = 40
SAMPLED = SamplingParams(
    max_new_tokens=NUM_NEW,
    temperature=1.0,
    seed=5,
    ignore_eos=True,
    frequency_penalty=0.3,
    logprobs=LogprobParams(start_len=-1, top_num=3),
)


@dataclass(frozen=True)
class Streamed:
    """What a client has received, and the KV that is left of it."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    kv: torch.Tensor
    """Of the layers that see all of a sequence."""
    window_kv: torch.Tensor
    """Of the others, good for the last tokens."""


def streamed(cluster: Cluster, ids: list[int], known: list[int]) -> Streamed:
    """A stream of which the first tokens are `known`, beside another one."""
    client = Client(cluster)
    key = client.submit(ids, SAMPLED, output_ids=known)
    client.submit(ids[5:], SAMPLED)
    cluster.run_all()
    answer, engine = cluster.router.answers[key], cluster.nodes["d0"].engine
    assert not answer.failures
    pages = engine.ledger.match_prefix([*ids, *answer.token_ids], "").pages
    pool = engine.pool
    full, window = (pool.full, pool.window) if isinstance(pool, WindowedKVPool) else (pool, pool)
    kv = kv_of(full, pages)
    window_kv = kv_of(window, engine.ledger.window_pages_of(pages)) if window is not full else kv
    return Streamed(answer.token_ids, answer.logprobs, kv, window_kv)


def kv_of(pool: TokenToKVPool, pages: Sequence[int]) -> torch.Tensor:
    """The bits of K and V, [layer, K or V, token, head, dim]."""
    kept = pool.buffer_LSNHPD[:, :, list(pages)]
    if kept.dtype == torch.int8:
        codes, scales = split_codes(kept)
        kept = torch.cat([codes, scales[..., None].contiguous().view(torch.int8)], -1)
    return kept.transpose(3, 4).flatten(2, 3).contiguous().view(torch.int8)


def assert_goes_on(again: Streamed, whole: Streamed, num_known: int, prompt_len: int) -> None:
    """What comes after the known tokens of a stream has the bits of the undisturbed stream, and so has its KV."""
    assert again.tokens == whole.tokens
    assert again.logprobs == {
        position: found for position, found in whole.logprobs.items() if position >= num_known
    }
    num_tokens = min(again.kv.shape[2], whole.kv.shape[2])
    assert num_tokens >= prompt_len + NUM_NEW - 16
    assert torch.equal(again.kv[:, :, :num_tokens], whole.kv[:, :, :num_tokens])
    last = slice(num_tokens - 8, num_tokens)
    assert torch.equal(again.window_kv[:, :, last], whole.window_kv[:, :, last])


@pytest.mark.parametrize("model", FACTORS["model"])
def test_a_stream_goes_on_to_the_bit_elsewhere(zoo: Zoo, model: str) -> None:
    """A node that prefills prompt and output again leaves the KV, tokens and logprobs of an undisturbed stream."""
    folder, ids = zoo.folder(model), zoo.prompts(model)[NUM_REQS - 1]
    with unsplit(config_of(folder, chunk=512)) as cluster:
        whole = streamed(cluster, ids, [])
    assert len(whole.tokens) == NUM_NEW
    for num_known, chunk, page_size in ((1, 512, 16), (17, 23, 8), (NUM_NEW - 2, 7, 16)):
        with split(config_of(folder, chunk=chunk, page_size=page_size)) as cluster:
            again = streamed(cluster, ids, whole.tokens[:num_known])
        assert_goes_on(again, whole, num_known, len(ids))
