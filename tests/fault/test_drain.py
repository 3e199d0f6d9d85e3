"""Nodes and a router are drained while they serve: no client sees anything of it."""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fault.slow_model import LONG, SlowModel
from tests.patience import until
from tests.processes import HOST, Call, Fleet, is_home

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_NEW, NUM_STREAMS = 100, 4


def counter(fleet: Fleet, name: str) -> float:
    """A counter of the router, over all its labels."""
    _, metrics = fleet.router.get("/metrics")
    return sum(
        float(value) for value in re.findall(rf"^baton:{name}_total{{.*}} (.*)$", metrics, re.MULTILINE)
    )


def remove(fleet: Fleet, name: str) -> dict[str, Any]:
    """DELETE /fleet/nodes/NAME."""
    connection = http.client.HTTPConnection(HOST, fleet.router.port, timeout=200)
    connection.request("DELETE", f"/fleet/nodes/{name}?drain_timeout_s=200")
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.fixture(scope="module")
def shared_fleet(slow_model: SlowModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ("--page-size", "4", "--max-total-tokens", "2048")
    with Fleet(tmp_path_factory.mktemp("drain"), slow_model.folder, "1P2D", flags=flags) as fleet:
        yield fleet
        fleet.mend()
        fleet.stop()


@dataclass
class Streams:
    """Some long streams, every second with logprobs, at least one of which runs on d0."""

    fleet: Fleet
    prompts: list[list[int]]
    calls: list[Call]

    @classmethod
    def begin(cls, fleet: Fleet, model: SlowModel) -> Streams:
        prompts = [model.fresh_prompt(40) for _ in range(NUM_STREAMS)]
        calls = [
            fleet.router.generate(ids, NUM_NEW, stream=True, return_logprob=n % 2 == 1)
            for n, ids in enumerate(prompts)
        ]
        for call in calls:
            call.wait_tokens(3)
        until(lambda: fleet.router.loads()["d0"]["num_running"] > 0, "d0 has some")
        return cls(fleet, prompts, calls)

    def check(self, model: SlowModel) -> None:
        """They are as those of an undisturbed run."""
        tokens = [call.tokens() for call in self.calls]
        assert tokens == model.greedy_batch(self.prompts, NUM_NEW)


def test_a_removed_decode_node_moves_what_it_has(fleet: Fleet, slow_model: SlowModel) -> None:
    before = counter(fleet, "num_moves"), counter(fleet, "num_failovers")
    streams = Streams.begin(fleet, slow_model)
    assert remove(fleet, "d0")["num_failed_over"] == 0
    assert set(fleet.router.loads()) == {"p0", "d1"}
    assert not all(call.ended for call in streams.calls), "it did not wait for their ends"
    streams.check(slow_model)
    assert counter(fleet, "num_moves") > before[0] and counter(fleet, "num_failovers") == before[1]
    fleet.router.wait_home()
    added = fleet.router.post("/fleet/nodes", {"role": "decode", "address": fleet.nodes["d0"].address})
    assert added.finish().status == 200


def test_a_decode_node_that_is_told_to_stop_moves_what_it_has(fleet: Fleet, slow_model: SlowModel) -> None:
    before = counter(fleet, "num_moves"), counter(fleet, "num_failovers")
    streams = Streams.begin(fleet, slow_model)
    assert fleet.nodes["d0"].stop() == 0
    assert not all(call.ended for call in streams.calls), "it did not wait for their ends"
    fleet.nodes["d0"].start()
    fleet.wait_ready()
    streams.check(slow_model)
    assert counter(fleet, "num_moves") > before[0] and counter(fleet, "num_failovers") == before[1]
    fleet.router.wait_home()


def test_a_prefill_node_that_is_told_to_stop_finishes_what_it_has(
    fleet: Fleet, slow_model: SlowModel
) -> None:
    prompts = [slow_model.fresh_prompt(LONG) for _ in range(4)]
    calls = [fleet.router.generate(ids, 8, stream=True) for ids in prompts]
    until(lambda: not is_home(fleet.router.loads()["p0"]), "p0 has some")
    assert fleet.nodes["p0"].stop() == 0
    assert [call.tokens() for call in calls] == slow_model.greedy_batch(prompts, 8)
    fleet.nodes["p0"].start()
    fleet.wait_ready()


def test_a_router_that_is_told_to_stop_finishes_its_streams(fleet: Fleet, slow_model: SlowModel) -> None:
    streams = Streams.begin(fleet, slow_model)
    fleet.router.send(signal.SIGTERM)
    until(lambda: fleet.router.get("/health")[0] == 503, "it is not ready")
    assert fleet.router.generate(slow_model.fresh_prompt(8), 4).finish().status == 503
    streams.check(slow_model)
    assert fleet.router.wait() == 0
    fleet.router.start()
    fleet.wait_ready()
