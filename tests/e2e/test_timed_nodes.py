"""The fleets on which the planner's error is measured: real processes that wait where a forward would compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.traffic.trace import SimRequest
from tests.bench.replay import replay
from tests.bench.timed_node import TimedNode, TimedNodes, timed_fleet
from tests.bench.timed_stream import VOCAB_SIZE

pytestmark = pytest.mark.processes

COSTS = CostModel(a=0.01, b=1e-4, c=0.0, d=0.01, e=0.001, f=0.0)
NODES = TimedNodes(costs=COSTS, pool_tokens=8192, chunked_prefill_size=128)
BLOCK_TOKENS, INPUT_LEN = 64, 200
CHUNKS = ((0, 128), (128, 72))


def test_requests_have_their_lengths_and_take_at_least_what_their_forwards_do(tmp_path: Path) -> None:
    alone = [
        SimRequest(0.5 * i, INPUT_LEN, 3 + i, tuple(range(4 * i, 4 * i + 4)), BLOCK_TOKENS) for i in range(3)
    ]
    again = SimRequest(2.0, INPUT_LEN, 4, alone[0].blocks, BLOCK_TOKENS)
    last = SimRequest(2.5, INPUT_LEN, 1, (90, 91, 92, 93), BLOCK_TOKENS)
    prompt_s = sum(COSTS.extend_s([chunk]) for chunk in CHUNKS)
    with timed_fleet(NODES, Candidate(num_prefill=1, num_decode=1), tmp_path) as fleet:
        seen = replay(fleet.router.port, [*alone, again, last], fleet.router.family(), VOCAB_SIZE)
        pages = {name: load["kv_bytes_transferred"] for name, load in fleet.router.loads().items()}
        fleet.stop()
    assert isinstance(prefill := fleet.nodes["p0"], TimedNode)
    assert prefill.forwards[0] >= 2 * 4 + 1, "two chunks of each prompt but the cached one"
    assert prefill.forwards[1] >= 4 * prompt_s
    assert seen.failed == []
    assert [seen.served[i].num_tokens for i in range(5)] == [3, 4, 5, 4, 1]
    for one in (*(seen.served[i] for i in range(3)), seen.served[4]):
        assert one.ttft_s > prompt_s
        assert one.e2e_s > prompt_s + (one.num_tokens - 1) * COSTS.decode_s(1, INPUT_LEN)
    assert seen.num_prompt_tokens == 5 * INPUT_LEN
    assert seen.num_cached_tokens == INPUT_LEN // NODES.page_size * NODES.page_size, (
        "the repeated prompt is cached"
    )
    assert pages["p0"] > 0 and pages["p0"] % (NODES.page_size * NODES.kv_bytes_per_token) == 0
    assert seen.cpu_share > 0


def test_a_request_that_cannot_be_served_counts_as_failed(tmp_path: Path) -> None:
    blocks = tuple(range(300))
    too_long = SimRequest(0.0, 300 * BLOCK_TOKENS, 4, blocks, BLOCK_TOKENS)
    with timed_fleet(NODES, Candidate(num_prefill=0, num_decode=1), tmp_path) as fleet:
        seen = replay(
            fleet.router.port, [too_long, SimRequest(0.1, 50, 2, (1,), BLOCK_TOKENS)], (), VOCAB_SIZE
        )
    assert list(seen.served) == [1]
    assert len(seen.failed) == 1 and "context" in seen.failed[0]
