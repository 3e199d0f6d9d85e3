"""In bf16 by the native kernels: greedy tokens of 1 prefill + 1 decode == of one node with one request at a time.

They are the same bits whatever the batch, the chunks, the page size and the prefix that was there, and so the tokens
are too. Retraction is left out: KV that a decode step wrote comes back from an extend, whose attention sums in
another order, so tokens may part where two are nearly tied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shared.config import NodeConfig
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import load_library
from shared.protocol.sampling_params import SamplingParams
from tests.golden.pairwise import pairwise
from tests.golden.references import Zoo
from tests.golden.serving import Client, node_config, split, unsplit

NUM_PROMPTS = 32
P_PREFIX, D_PREFIX = 37, 53
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _native_kernels() -> None:
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(f"NO NATIVE KERNELS: {reason}")


@dataclass(frozen=True)
class Case:
    model: str
    prefix: bool
    page_size: int
    chunk: int
    overlap: bool
    num_reqs: int
    mixed: bool

    def __str__(self) -> str:
        named = {"hit": self.prefix, "overlap": self.overlap, "mixed": self.mixed}
        flags = "".join(f"-{name}" for name, on in named.items() if on)
        return f"{self.model}-page{self.page_size}-chunk{self.chunk}-reqs{self.num_reqs}{flags}"


FACTORS: dict[str, tuple[object, ...]] = {
    "model": ("qwen3", "builtin"),
    "prefix": (False, True),
    "page_size": (1, 16),
    "chunk": (23, 512),
    "overlap": (True, False),
    "num_reqs": (1, NUM_PROMPTS),
    "mixed": (False, True),
}
CASES = [Case(*values) for values in pairwise(FACTORS)]  # type: ignore[arg-type]


def config_of(folder: Path, **options: object) -> NodeConfig:
    config = node_config(folder, **options)  # type: ignore[arg-type]
    return replace(config, model=replace(config.model, dtype="bfloat16", attention_backend="native"))


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> dict[str, list[list[int]]]:
    """The tokens of each model's prompts, one at a time on one node."""
    found: dict[str, list[list[int]]] = {}
    for model in FACTORS["model"]:
        with unsplit(config_of(zoo.folder(str(model)), chunk=512, overlap=False)) as cluster:
            client = Client(cluster)
            found[str(model)] = [client.tokens([ids], PARAMS)[0] for ids in zoo.prompts(str(model))]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_equals_one_node(zoo: Zoo, alone: dict[str, list[list[int]]], case: Case) -> None:
    config = config_of(
        zoo.folder(case.model),
        page_size=case.page_size,
        chunk=case.chunk,
        overlap=case.overlap,
        enable_mixed_chunk=case.mixed,
    )
    prompts = zoo.prompts(case.model)[: case.num_reqs]
    with split(config) as cluster:
        client = Client(cluster)
        if case.prefix:
            for ids in prompts:
                client.leave_prefix("p0", ids[:P_PREFIX])
                client.leave_prefix("d0", ids[:D_PREFIX])
        assert client.tokens(prompts, PARAMS) == alone[case.model][: case.num_reqs]
