"""1P1D as two processes on one GPU, whose pages move over cuda-ipc: tokens, and kill -9 of either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import device
from tests.gpu.shapes import fleet_model
from tests.modelzoo import random_prompt
from tests.patience import until
from tests.processes import Fleet

ON_A_GPU = device().type == "cuda"
TRANSPORT = "cuda-ipc" if ON_A_GPU else "shm"
GPU_FLAGS = (
    *("--device", "cuda", "--attention-backend", "triton", "--exact"),
    *("--max-total-tokens", "131072", "--mem-fraction-static", "0.4"),
)
CPU_FLAGS = ("--device", "cpu", "--attention-backend", "auto", "--max-total-tokens", "16384")
PROMPT_TOKENS, NUM_NEW, NUM_REQUESTS = (6000, 400, 8) if ON_A_GPU else (300, 60, 3)
BEGUN = 20
"""Tokens that a stream has when its node is killed."""
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    model = fleet_model(root, dry=not ON_A_GPU)
    flags = (*model.flags[2:], *(GPU_FLAGS if ON_A_GPU else CPU_FLAGS), "--kv-transfer", TRANSPORT)
    router_flags = ("--local-prefill-tokens", "0", "--failover-timeout-s", "120")
    with Fleet(
        root / "logs", model.folder, flags=flags, router_flags=router_flags, patience_s=PATIENCE_S
    ) as fleet:
        yield fleet
        fleet.stop()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(PROMPT_TOKENS + i, seed=i) for i in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(fleet: Fleet, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of one request after the other."""
    return [fleet.router.generate(ids, NUM_NEW).tokens() for ids in prompts]


def flush(fleet: Fleet) -> None:
    """Pages that a node has cached are not moved."""
    fleet.router.wait_home()
    assert fleet.router.post("/flush_cache", {}).finish().status == 200


def test_pages_move_over_the_transport(
    fleet: Fleet, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    flush(fleet)
    call = fleet.router.generate(prompts[0], NUM_NEW, return_timeline=True)
    assert call.tokens() == expected[0]
    assert call.last["meta_info"]["kv_pages_transferred"] == -(-PROMPT_TOKENS // 16)
    links = [link for load in fleet.router.loads().values() for link in load["links"]]
    assert [link["transport"] for link in links] == [TRANSPORT, TRANSPORT], links


def test_a_batch_gets_the_tokens_of_one_at_a_time(
    fleet: Fleet, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    flush(fleet)
    calls = [fleet.router.generate(ids, NUM_NEW) for ids in prompts]
    assert [call.tokens() for call in calls] == expected


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_streams_survive_kill_9(
    fleet: Fleet, prompts: list[list[int]], expected: list[list[int]], victim: str
) -> None:
    flush(fleet)
    calls = [fleet.router.generate(ids, NUM_NEW, stream=True) for ids in prompts]
    calls[0].wait_tokens(BEGUN)
    fleet.nodes[victim].kill()
    until(lambda: victim not in fleet.router.loads(), f"{victim} is lost", PATIENCE_S)
    fleet.nodes[victim].start()
    assert [call.tokens() for call in calls] == expected
    fleet.mend()
    test_pages_move_over_the_transport(fleet, prompts, expected)
