"""Greedy tokens of 1 prefill + 1 decode == of one node == of a plain transformers loop, in float32.

The factors are covered pairwise: every two values of any two factors meet in some case.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from shared.config import NodeConfig
from shared.protocol.messages import first_window_page
from tests.cluster import Cluster
from tests.golden.pairwise import pairwise
from tests.golden.references import MODELS, NUM_NEW, Zoo
from tests.golden.serving import Client, node_config, split, unsplit

NUM_REQS = 12
"""At once: of each length, and of some lengths two."""
P_PREFIX, D_PREFIX = 37, 53
"""Tokens of each prompt that P and D have computed before, where the case says so."""


@dataclass(frozen=True)
class Case:
    model: str
    page_size: int
    chunk: int
    overlap: bool
    prefix: str
    retract_every: int
    num_reqs: int
    mixed: bool

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "serial"
        retract = f"-retract{self.retract_every}" if self.retract_every else ""
        return (
            f"{self.model}-page{self.page_size}-chunk{self.chunk}-{overlap}-hit_{self.prefix}"
            f"{retract}-reqs{self.num_reqs}{'-mixed' if self.mixed else ''}"
        )


FACTORS: dict[str, tuple[object, ...]] = {
    "model": MODELS,
    "page_size": (1, 16),
    "chunk": (20, 23),  # divides every prompt, divides none
    "overlap": (True, False),
    "prefix": ("none", "p", "d", "both"),
    "retract_every": (0, 3),
    "num_reqs": (1, NUM_REQS),
    "mixed": (False, True),
}


def by_model(cases: list[Case]) -> list[object]:
    """Those of a model run in one process, which computes its references once."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"golden {case.model}"))
        for case in cases
    ]


CASES = by_model([Case(*values) for values in pairwise(FACTORS)])  # type: ignore[arg-type]
ON_ONE_NODE = by_model([Case(*values) for values in pairwise({**FACTORS, "prefix": ("none", "d")})])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.xdist_group(f"golden {model}")) for model in MODELS]
)
def test_reference_outputs_are_diverse(zoo: Zoo, model: str) -> None:
    """At least 10 distinct tokens in 32; the built-in model may repeat itself after a few of its prompts."""
    outputs = [zoo.greedy(model, i) for i in range(NUM_REQS)]
    num_dull = sum(len(set(tokens)) < 10 for tokens in outputs)
    assert num_dull <= (NUM_REQS // 8 if model == "builtin" else 0)
    assert len({tuple(tokens) for tokens in outputs}) == NUM_REQS


@pytest.mark.parametrize("case", CASES)
def test_split_equals_reference(zoo: Zoo, case: Case) -> None:
    config = config_of(zoo, case)
    prompts = zoo.prompts(case.model)[: case.num_reqs]
    with split(config) as cluster:
        client = Client(cluster)
        p_hit = leave_prefixes(client, "p0", prompts, P_PREFIX) if case.prefix in ("p", "both") else 0
        d_hit = leave_prefixes(client, "d0", prompts, D_PREFIX) if case.prefix in ("d", "both") else 0
        keys = [client.submit(ids) for ids in prompts]
        cluster.run_all()
        for i, key in enumerate(keys):
            assert cluster.tokens(key) == zoo.greedy(case.model, i), f"prompt {i}"
            on_prefill, *_, at_finish = cluster.router.answers[key].reports
            moved = -(-len(prompts[i]) // case.page_size) - d_hit // case.page_size
            assert on_prefill.cached_tokens == p_hit
            assert at_finish.kv_pages_transferred == moved
            assert at_finish.kv_bytes_transferred == sent_nbytes(cluster, len(prompts[i]), moved)
        check_retractions(cluster, case)
        cluster.assert_idle()


@pytest.mark.parametrize("case", ON_ONE_NODE)
def test_unsplit_equals_reference(zoo: Zoo, case: Case) -> None:
    config = config_of(zoo, case)
    prompts = zoo.prompts(case.model)[: case.num_reqs]
    with unsplit(config) as cluster:
        client = Client(cluster)
        hit = leave_prefixes(client, "d0", prompts, D_PREFIX) if case.prefix == "d" else 0
        keys = [client.submit(ids) for ids in prompts]
        cluster.run_all()
        for i, key in enumerate(keys):
            assert cluster.tokens(key) == zoo.greedy(case.model, i), f"prompt {i}"
            report = cluster.router.answers[key].reports[-1]
            assert report.cached_tokens == hit or (report.num_retractions and report.cached_tokens >= hit)
            assert report.kv_pages_transferred == 0
        check_retractions(cluster, case)
        cluster.assert_idle()


def config_of(zoo: Zoo, case: Case) -> NodeConfig:
    options = {
        name: value for name, value in asdict(case).items() if name in ("page_size", "chunk", "overlap")
    }
    return node_config(
        zoo.folder(case.model),
        retract_every=case.retract_every,
        enable_mixed_chunk=case.mixed,
        **options,
    )


def leave_prefixes(client: Client, node: str, prompts: list[list[int]], length: int) -> int:
    """Every prompt's first `length` tokens are computed on `node`; returns how many of them a match finds."""
    for ids in prompts:
        client.leave_prefix(node, ids[:length])
    page_size = client.cluster.nodes[node].engine.ledger.page_size
    return length // page_size * page_size


def sent_nbytes(cluster: Cluster, num_tokens: int, num_pages: int) -> int:
    """K and V in float32 of the last `num_pages` pages of a prompt. Of a window, what it shows."""
    layout = cluster.nodes["d0"].engine.layout
    first = first_window_page(num_tokens, max(layout.windows, default=0), layout.page_size)
    num_seen = min(num_pages, -(-num_tokens // layout.page_size) - first)
    num_windows = layout.num_window_layers
    num_units = num_pages * (layout.num_layers - num_windows) + num_seen * num_windows
    return num_units * 2 * layout.num_kv_heads * layout.page_size * layout.head_dim * 4


def check_retractions(cluster: Cluster, case: Case) -> None:
    count = cluster.nodes["d0"].scheduler.batcher.num_retractions
    assert count >= NUM_NEW // 4 if case.retract_every else count == 0
