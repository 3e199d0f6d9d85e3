"""Which request counts more: its priority, and what waiting has added to it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config import ScheduleOptions
from shared.scheduling.req import Req


class PriorityRule:
    """The class of a request, which leads the sort key of every policy, and who may be retracted for whom.

    A request's level is its priority (0 unless priority scheduling is on) plus one for every `priority_aging_steps`
    forwards since it arrived: the aging of multilevel feedback queues. All age alike, so a request whose priority
    is lower by d than any other's goes, from (d + 1) * priority_aging_steps forwards after its arrival on, before
    everybody who arrives later, and can no longer be retracted for them: nobody starves. Steps are launched
    forwards, not seconds, so the same messages give the same decisions.
    """

    def __init__(self, options: ScheduleOptions) -> None:
        self.enabled = options.enable_priority_scheduling
        """Whether the priority that clients gave counts at all; waiting always does."""
        self._sign = -1 if options.schedule_low_priority_values_first else 1
        self._aging_steps = options.priority_aging_steps
        self._threshold = options.priority_scheduling_preemption_threshold

    def level(self, req: Req, step: int) -> int:
        """Higher goes first. `step` is the number of forwards launched so far."""
        if not self._aging_steps or req.arrival_step is None:
            return self._given(req)
        return self._given(req) + (step - req.arrival_step) // self._aging_steps

    def rank(self, req: Req, step: int) -> tuple[int, int]:
        """The order between requests of different queues: smaller goes first, and no two are equal.

        The level leads where priorities count. Otherwise the level follows from the age, so the age says it all.
        """
        return -self.level(req, step) if self.enabled else 0, req.arrival_number

    def may_preempt(self, waiting: Req, running: Req, step: int) -> bool:
        """Whether `running` may be retracted for `waiting`.

        Age protects the running one, and does not help the waiting one: it is no reason to take what others have.
        """
        return self.enabled and self._given(waiting) - self.level(running, step) > self._threshold

    def may_preempt_any(self, waiting: Sequence[Req], running: Sequence[Req], step: int) -> bool:
        """Whether any of `waiting` may have any of `running` retracted."""
        if not (self.enabled and waiting and running):
            return False
        lowest = min(self.level(req, step) for req in running)
        return max(self._given(req) for req in waiting) - lowest > self._threshold

    def _given(self, req: Req) -> int:
        return self._sign * req.work.priority if self.enabled else 0
