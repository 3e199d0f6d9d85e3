"""What age does for a request, and what it does not."""

from __future__ import annotations

from shared.config import ScheduleOptions
from shared.scheduling.priority import PriorityRule
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
