"""SIGSTOP: a node that is alive and says nothing. Its connections stay open; only silence tells.

SIGCONT then: it comes back by itself, has let go of what was given up meanwhile, and serves again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.fault.slow_model import (
    DECODE_FLAGS,
    LOCAL,
    NODE_FLAGS,
    SlowModel,
    Stage,
    bring_into,
    expect_failure,
)
from tests.processes import Fleet, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

NODE_TIMEOUT_S, PEER_TIMEOUT_S = 2, 1
SEEN_WITHIN_S = NODE_TIMEOUT_S + 8.0
LONG_OUTPUT = 1200
"""So that a node that went on with a request that was given up would be at it for a while."""


@pytest.fixture(scope="module")
def shared_fleet(slow_model: SlowModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(
        tmp_path_factory.mktemp("stopped"),
        slow_model.folder,
        flags=(*NODE_FLAGS, "--peer-timeout-s", str(PEER_TIMEOUT_S)),
        decode_flags=DECODE_FLAGS,
        router_flags=("--local-prefill-tokens", str(LOCAL), "--node-timeout-s", str(NODE_TIMEOUT_S)),
    ) as fleet:
        yield fleet
        fleet.mend()
        fleet.stop()


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("p0", Stage.BOOTSTRAP),
        ("p0", Stage.PREFILLING),
        ("p0", Stage.TRANSFERRING),
        ("d0", Stage.PREFILLING),
        ("d0", Stage.TRANSFERRING),
        ("d0", Stage.DECODING),
    ],
)
def test_stop_and_continue(name: str, stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    running = bring_into(stage, fleet, slow_model, num_new=LONG_OUTPUT)
    stopped_at = time.monotonic()
    fleet.nodes[name].send(signal.SIGSTOP)

    expect_failure(
        running,
        {"p0": "prefill node", "d0": "decode node"}[name],
        since=stopped_at,
        within_s=SEEN_WITHIN_S,
        in_stage=name == "p0" or stage is not Stage.PREFILLING,  # the prefill node goes on
    )
    running.hang_up()
    wait_until(f"{name} is lost", lambda: name not in fleet.router.loads(), SEEN_WITHIN_S)
    survivor = {"p0": "d0", "d0": "p0"}[name]
    print(f"{survivor} empty after {fleet.router.wait_home(survivor):.1f} s")
    if name == "p0":
        slow_model.check_next(fleet, split=False)

    incarnation = incarnations(fleet)
    fleet.nodes[name].send(signal.SIGCONT)
    continued_at = time.monotonic()
    fleet.wait_ready(timeout_s=20)
    print(f"back after {time.monotonic() - continued_at:.1f} s")
    print(f"empty after {fleet.router.wait_home(timeout_s=8):.1f} s")
    assert incarnation.items() <= incarnations(fleet).items(), "it is the same process"
    slow_model.check_next(fleet)


def incarnations(fleet: Fleet) -> dict[str, str]:
    _, info = fleet.router.get("/get_server_info")
    return {node["node_id"]: node["incarnation"] for node in info["nodes"]}
