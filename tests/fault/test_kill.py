"""kill -9 of each node in each stage of a request: its client sees a pause, and then the rest of the same stream.

What is dead is noticed by its closed connections: no silence lasts long enough here (tests.processes.NO_TIMEOUT_S).
"""

from __future__ import annotations

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
)
from tests.patience import until
from tests.processes import NO_TIMEOUT_S, Fleet

pytestmark = pytest.mark.processes

NUM_DECODED = 200


@pytest.fixture(scope="module")
def shared_fleet(slow_model: SlowModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(
        tmp_path_factory.mktemp("kill"),
        slow_model.folder,
        flags=NODE_FLAGS,
        decode_flags=DECODE_FLAGS,
        router_flags=("--local-prefill-tokens", str(LOCAL), "--failover-timeout-s", NO_TIMEOUT_S),
    ) as fleet:
        yield fleet
        fleet.mend()
        fleet.stop()


@pytest.mark.parametrize("stage", list(Stage))
def test_decode_node_is_killed(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    """It is the only one: what it had waits until it has been started again."""
    running = bring_into(stage, fleet, slow_model, num_new=NUM_DECODED)
    whole, whole_prompt = None, slow_model.fresh_prompt(LOCAL)
    if stage is Stage.DECODING:  # beside it, one that is not streamed
        whole = fleet.router.generate(whole_prompt, NUM_DECODED)
        fleet.router.wait_load("d0", num_running=2)
    kill(fleet, "d0", running)

    fleet.router.wait_home("p0")
    refused = fleet.router.generate(slow_model.fresh_prompt(LOCAL), 4).finish()
    assert refused.status == 503 and "d0" in (refused.error or ""), refused.describe()
    assert_in_stage(running)
    if running.blocker is not None:  # else it would be computed anew, all of it
        running.blocker.hang_up()
    fleet.nodes["d0"].start()
    assert running.call.tokens() == slow_model.greedy(running.prompt, NUM_DECODED)
    if whole is not None:
        assert whole.tokens() == slow_model.greedy(whole_prompt, NUM_DECODED)
    fleet.wait_ready()
    slow_model.check_next(fleet)
    fleet.router.wait_home()


@pytest.mark.parametrize("stage", list(Stage))
def test_prefill_node_is_killed(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    running = bring_into(stage, fleet, slow_model)
    kill(fleet, "p0", running)
    if running.blocker is not None:  # d0 alone serves it, beside the other
        running.blocker.wait_tokens(len(running.blocker.token_ids) + 20)
        running.blocker.hang_up()
    assert running.call.tokens() == slow_model.greedy(running.prompt, NUM_NEW)
    fleet.router.wait_home("d0")
    until(lambda: fleet.router.get("/health")[1]["status"] == "degraded", "degraded")
    slow_model.check_next(fleet, split=False)

    fleet.nodes["p0"].start()
    fleet.wait_ready()
    slow_model.check_next(fleet)
    fleet.router.wait_home()


@pytest.mark.parametrize("stage", list(Stage))
def test_client_goes_away(stage: Stage, fleet: Fleet, slow_model: SlowModel) -> None:
    num_before, num_new = fleet.router.loads()["d0"]["num_generated_tokens"], 1200
    running = bring_into(stage, fleet, slow_model, num_new=num_new)
    running.call.hang_up()
    assert_in_stage(running)
    if running.blocker is not None:
        fleet.router.wait_load("p0", num_bootstrapping=0)
        fleet.router.wait_load("d0", num_bootstrapping=0)
        running.blocker.wait_tokens(len(running.blocker.token_ids) + 5)
        assert running.blocker.error is None
        running.blocker.hang_up()
    fleet.router.wait_home()
    if running.blocker is None:
        num_generated = fleet.router.loads()["d0"]["num_generated_tokens"] - num_before
        assert num_generated < num_new / 2, "d0 went on with what its client had left"
    slow_model.check_next(fleet)  # through the one staging slot, so that is back too


def kill(fleet: Fleet, name: str, running: Running) -> None:
    assert_in_stage(running)
    fleet.nodes[name].kill()
