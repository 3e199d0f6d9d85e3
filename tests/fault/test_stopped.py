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
)
from tests.patience import until
from tests.processes import NO_TIMEOUT_S, Fleet

pytestmark = pytest.mark.processes

NODE_TIMEOUT_S, PEER_TIMEOUT_S = 5, 3
"""Longer than a process of a loaded machine may pause."""
NUM_DECODED = 200


@pytest.fixture(scope="module")
def shared_fleet(slow_model: SlowModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(
        tmp_path_factory.mktemp("stopped"),
        slow_model.folder,
        flags=(*NODE_FLAGS, "--peer-timeout-s", str(PEER_TIMEOUT_S)),
        decode_flags=DECODE_FLAGS,
        router_flags=(
            "--local-prefill-tokens",
            str(LOCAL),
            "--node-timeout-s",
            str(NODE_TIMEOUT_S),
            "--failover-timeout-s",
            NO_TIMEOUT_S,
        ),
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
    """What it had goes on elsewhere, or, if there is no other decode node, on itself when it is back."""
    running = bring_into(stage, fleet, slow_model, num_new=NUM_DECODED)
    fleet.nodes[name].send(signal.SIGSTOP)
    until(lambda: name not in fleet.router.loads(), f"{name} is lost")
    if running.blocker is not None:  # else it would be computed anew, all of it
        running.blocker.hang_up()
    if name == "p0":
        assert running.call.tokens() == slow_model.greedy(running.prompt, NUM_DECODED)
        slow_model.check_next(fleet, split=False)
    survivor = {"p0": "d0", "d0": "p0"}[name]
    fleet.router.wait_home(survivor)

    incarnation = incarnations(fleet)
    fleet.nodes[name].send(signal.SIGCONT)
    fleet.wait_ready()
    assert running.call.tokens() == slow_model.greedy(running.prompt, NUM_DECODED)
    fleet.router.wait_home()
    assert incarnation.items() <= incarnations(fleet).items(), "it is the same process"
    slow_model.check_next(fleet)


def incarnations(fleet: Fleet) -> dict[str, str]:
    _, info = fleet.router.get("/get_server_info")
    return {node["node_id"]: node["incarnation"] for node in info["nodes"]}
