"""SIGSTOP: a node that is alive and says nothing. Its connections stay open; only silence tells.

SIGCONT then: it comes back by itself, has let go of what was given up meanwhile, and serves again.
"""

from __future__ import annotations

import signal
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
from tests.patience import until
from tests.processes import Fleet

pytestmark = pytest.mark.processes

NODE_TIMEOUT_S, PEER_TIMEOUT_S = 5, 3
"""Longer than a process of a loaded machine may pause."""
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
    num_before = fleet.router.loads()["d0"]["num_generated_tokens"]
    running = bring_into(stage, fleet, slow_model, num_new=LONG_OUTPUT)
    fleet.nodes[name].send(signal.SIGSTOP)

    expect_failure(
        running,
        {"p0": "prefill node", "d0": "decode node"}[name],
        in_stage=name == "p0" or stage is not Stage.PREFILLING,  # the prefill node goes on
    )
    running.hang_up()
    until(lambda: name not in fleet.router.loads(), f"{name} is lost")
    survivor = {"p0": "d0", "d0": "p0"}[name]
    fleet.router.wait_home(survivor)
    if name == "p0":
        slow_model.check_next(fleet, split=False)

    incarnation = incarnations(fleet)
    fleet.nodes[name].send(signal.SIGCONT)
    fleet.wait_ready()
    fleet.router.wait_home()
    if running.blocker is None:
        num_generated = fleet.router.loads()["d0"]["num_generated_tokens"] - num_before
        assert num_generated < LONG_OUTPUT / 2, "d0 went on with what was given up"
    assert incarnation.items() <= incarnations(fleet).items(), "it is the same process"
    slow_model.check_next(fleet)


def incarnations(fleet: Fleet) -> dict[str, str]:
    _, info = fleet.router.get("/get_server_info")
    return {node["node_id"]: node["incarnation"] for node in info["nodes"]}
