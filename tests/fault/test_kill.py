"""kill -9 of each node in each stage of a request: what its client sees, what the survivor holds, what comes next."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.fault.slow_model import (
    DECODE_FLAGS,
    LOCAL,
    NODE_FLAGS,
    NUM_NEW,
    Running,
    SlowModel,
    Stage,
    assert_in_stage,
    bring_into,
    expect_failure,
)
from tests.processes import Fleet, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SEEN_WITHIN_S = 6.0
"""A closed connection is an error to the client within 2 s on a machine that has time; this one may be loaded."""


@pytest.fixture(scope="module")
def shared_fleet(slow_model: SlowModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(
        tmp_path_factory.mktemp("kill"),
        slow_model.folder,
        flags=NODE_FLAGS,
        decode_flags=DECODE_FLAGS,
        router_flags=("--local-prefill-tokens", str(LOCAL)),
    ) as fleet:
        yield fleet
        fleet.mend()
        fleet.stop()


@pytest.mark.parametrize("stage", list(Stage))
def test_decode_node_is_killed(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    running = bring_into(stage, fleet, slow_model, num_new=600)
    whole = None
    if stage is Stage.DECODING:  # beside it, one that is not streamed
        whole = fleet.router.generate(slow_model.fresh_prompt(LOCAL), 1200)
        fleet.router.wait_load("d0", num_running=2)
    killed_at = kill(fleet, "d0", running)

    expect_failure(running, "decode node", since=killed_at, within_s=SEEN_WITHIN_S)
    if whole is not None:
        assert whole.finish(SEEN_WITHIN_S).status == 503 and "d0" in (whole.error or ""), whole.describe()
    if running.blocker is not None:
        running.blocker.finish(SEEN_WITHIN_S)
        assert "d0" in (running.blocker.error or "") and running.blocker.saw_done
    fleet.router.wait_home("p0")
    refused = fleet.router.generate(slow_model.fresh_prompt(LOCAL), 4).finish(SEEN_WITHIN_S)
    assert refused.status == 503 and "d0" in (refused.error or ""), refused.describe()

    fleet.nodes["d0"].start()
    fleet.wait_ready()
    slow_model.check_next(fleet)
    fleet.router.wait_home()


@pytest.mark.parametrize("stage", list(Stage))
def test_prefill_node_is_killed(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    running = bring_into(stage, fleet, slow_model)
    num_before = len(running.blocker.token_ids) if running.blocker else 0
    killed_at = kill(fleet, "p0", running)

    if stage is Stage.DECODING:  # nothing of it is left on the prefill node
        assert running.call.tokens() == slow_model.greedy(running.prompt, NUM_NEW)
    else:
        expect_failure(running, "prefill node", since=killed_at, within_s=SEEN_WITHIN_S)
    if running.blocker is not None:
        running.blocker.wait_tokens(num_before + 20)  # d0 alone serves it
        assert running.blocker.error is None
        running.blocker.hang_up()
    fleet.router.wait_home("d0")
    wait_until("degraded", lambda: fleet.router.get("/health")[1]["status"] == "degraded", SEEN_WITHIN_S)
    slow_model.check_next(fleet, split=False)

    fleet.nodes["p0"].start()
    fleet.wait_ready()
    slow_model.check_next(fleet)
    fleet.router.wait_home()


@pytest.mark.parametrize("stage", list(Stage))
def test_client_goes_away(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    """With an output that would take far longer than the pages take to come back."""
    running = bring_into(stage, fleet, slow_model, num_new=1200)
    running.call.hang_up()
    assert_in_stage(running)
    if running.blocker is not None:
        fleet.router.wait_load("p0", num_bootstrapping=0)
        fleet.router.wait_load("d0", num_bootstrapping=0)
        running.blocker.wait_tokens(len(running.blocker.token_ids) + 5)
        assert running.blocker.error is None
        running.blocker.hang_up()
    print(f"home after {fleet.router.wait_home(timeout_s=SEEN_WITHIN_S):.1f} s")
    slow_model.check_next(fleet)  # through the one staging slot, so that is back too


def kill(fleet: Fleet, name: str, running: Running) -> float:
    """When it was done."""
    assert_in_stage(running)
    now = time.monotonic()
    fleet.nodes[name].kill()
    return now
