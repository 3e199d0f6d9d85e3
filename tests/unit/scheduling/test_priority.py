"""What age does for a request, and what it does not; and what an arrival without room keeps from others."""

from __future__ import annotations

import msgspec
import pytest

from shared.config import ScheduleOptions
from shared.scheduling.schedule_policy import Arrival, PriorityRule, choose_victims
from tests.prop.stepping import Stepping, new_req, rids
from tests.unit.scheduling.conftest import MakeReq


def test_age_protects_a_running_request_and_helps_no_waiting_one_to_preempt(make_req: MakeReq) -> None:
    rule = PriorityRule(
        ScheduleOptions(
            enable_priority_scheduling=True,
            priority_scheduling_preemption_threshold=2,
            priority_aging_steps=10,
        )
    )
    old, new = make_req(priority=3), make_req(priority=3)
    old.arrival_step, new.arrival_step = 0, 1000
    assert rule.level(old, 1000) == 103
    for waiting, running, step, expected in [
        (old, new, 1000, False),
        (make_req(priority=6), new, 1000, True),
        (make_req(priority=6), new, 1010, False),
    ]:
        assert rule.may_preempt(waiting, running, step) is expected
        assert rule.may_preempt_any([waiting], [running], step) is expected


@pytest.mark.parametrize(("priority", "is_next"), [(0, ["low"]), (1, [])])
def test_pages_that_an_arrival_waits_for_go_to_no_retracted_request_below_it(
    priority: int, is_next: list[str]
) -> None:
    stepping = Stepping(enable_priority_scheduling=True)
    low = new_req("low", [1, 2, 3], 20)
    stepping.add(low)
    for _ in range(3):
        stepping.step()
    stepping.batcher._retract(low)
    arrival = Arrival(new_req("arrival", [4, 5, 6], 20, priority=priority), lambda req, victims: False)
    assert rids(stepping.batcher.plan(arrival).batch) == is_next


@pytest.mark.parametrize("enabled", [False, True])
def test_a_request_that_ran_elsewhere_goes_before_new_ones_of_its_level(
    make_req: MakeReq, enabled: bool
) -> None:
    rule = PriorityRule(ScheduleOptions(enable_priority_scheduling=enabled))
    new, higher, resumed = make_req(), make_req(priority=1), make_req()
    resumed.key = msgspec.structs.replace(resumed.key, attempt=1)
    reqs = [new, higher, resumed]
    for number, req in enumerate(reqs):
        req.arrival_step, req.arrival_number = 0, number
    expected = [higher, resumed, new] if enabled else [resumed, new, higher]
    assert rule.in_order(reqs, 0) == sorted(reqs, key=lambda req: rule.rank(req, 0)) == expected


def test_the_policy_prefills_a_request_that_ran_elsewhere_first() -> None:
    stepping = Stepping(schedule_policy="fcfs", max_running_requests=1)
    stepping.add(new_req("new", [1, 2, 3], 20))
    resumed = new_req("resumed", [4, 5, 6], 20)
    resumed.key = msgspec.structs.replace(resumed.key, attempt=1)
    stepping.add(resumed)
    assert rids(stepping.batcher.plan().batch) == ["resumed"]


def test_of_victims_that_are_not_needed_the_later_ones_are_spared(make_req: MakeReq) -> None:
    """They lose more. Of 1, 1 and 2 pages, 3 are needed."""
    first, second, third = (make_req() for _ in range(3))
    pages = {first: 1, second: 1, third: 2}
    chosen = choose_victims([first, second, third], lambda some: sum(pages[req] for req in some) >= 3)
    assert chosen == [first, third]
    assert choose_victims([first, second], lambda some: sum(pages[req] for req in some) >= 3) == []
