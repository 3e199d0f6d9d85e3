"""Which request counts more, by its priority and by what waiting has added to it; and which are retracted for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.config import ScheduleOptions
from shared.scheduling.req import Req

WouldFit = Callable[[Req, Sequence[Req]], bool]
"""Whether a request would find room if others, which run, were retracted."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits outside the Batcher for room to receive its KV; `would_fit` judges that room."""

    req: Req
    would_fit: WouldFit


class PriorityRule:
    """The level of a request, which leads the sort key of every policy, and the victims of a waiting request.

    The level is the priority (0 unless priority scheduling is on) plus one for every `priority_aging_steps` forwards
    since the request arrived: the aging of multilevel feedback queues. So no request starves:
    (d + 1) * priority_aging_steps forwards after its arrival, a request goes before every new one whose priority is
    higher by d, and can no longer be retracted for it. Age is counted in forwards, not in seconds, so the same
    messages give the same decisions.
    """

    def __init__(self, options: ScheduleOptions) -> None:
        self.enabled = options.enable_priority_scheduling
        """Whether the priorities that clients gave count. Age always does."""
        self._sign = -1 if options.schedule_low_priority_values_first else 1
        self._aging_steps = options.priority_aging_steps
        self._threshold = options.priority_scheduling_preemption_threshold

    def level(self, req: Req, step: int) -> int:
        """Higher goes first. `step` is the number of forwards launched so far."""
        if not self._aging_steps or req.arrival_step is None:
            return self.given(req)
        return self.given(req) + (step - req.arrival_step) // self._aging_steps

    def rank(self, req: Req, step: int) -> tuple[int, bool, int]:
        """The order between requests of different queues: smaller goes first, and no two are equal.

        The level leads where priorities count. Then come requests that ran before, since they arrived earlier than
        any new one, though elsewhere; and then the order of arrival, from which the level follows.
        """
        return -self.level(req, step) if self.enabled else 0, not req.is_resumed, req.arrival_number

    def in_order(self, reqs: Sequence[Req], step: int) -> Sequence[Req]:
        """`reqs`, which are in order of arrival, by rank."""
        if self.enabled:
            return sorted(reqs, key=lambda req: (-self.level(req, step), not req.is_resumed))
        return sorted(reqs, key=lambda req: not req.is_resumed)

    def may_preempt(self, waiting: Req, running: Req, step: int) -> bool:
        """Whether `running` may be retracted for `waiting`. Age protects `running` and does not help `waiting`."""
        return self.enabled and self.given(waiting) - self.level(running, step) > self._threshold

    def may_preempt_any(self, waiting: Sequence[Req], running: Sequence[Req], step: int) -> bool:
        """Whether any of `waiting` may have any of `running` retracted."""
        if not (self.enabled and waiting and running):
            return False
        lowest = min(self.level(req, step) for req in running)
        return max(self.given(req) for req in waiting) - lowest > self._threshold

    def victims_for(self, waiting: Req, running: Sequence[Req], would_fit: WouldFit, step: int) -> list[Req]:
        """The requests of `running` that are retracted for `waiting`: lowest level first, then those that lose least.

        Empty when `waiting` would not fit even then.
        """
        candidates = sorted(
            (other for other in running if self.may_preempt(waiting, other, step)),
            key=lambda req: (self.level(req, step), req.output_len, -req.num_input_ids, str(req.key)),
        )
        return choose_victims(candidates, lambda some: would_fit(waiting, some))

    def given(self, req: Req) -> int:
        """The priority without what waiting has added to it."""
        return self._sign * req.work.priority if self.enabled else 0


def choose_victims(candidates: Sequence[Req], makes_room: Callable[[Sequence[Req]], bool]) -> list[Req]:
    """The first few of `candidates` that make room, without those among them that are not needed for it.

    Empty when not even all of them make room. `makes_room` must not turn false when a candidate is added.
    """
    if not candidates or not makes_room(candidates):
        return []
    num_needed = bisect_left(range(len(candidates)), True, key=lambda n: makes_room(candidates[:n]))
    victims = list(candidates[:num_needed])
    for spared in reversed(victims[:-1]):
        others = [victim for victim in victims if victim is not spared]
        if makes_room(others):
            victims = others
    return victims
