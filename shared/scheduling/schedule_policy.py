"""The order in which waiting requests are offered to the PrefillAdder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.scheduling.req import Req

SchedulePolicy = Callable[[Sequence[Req]], list[Req]]
"""Takes the waiting queue in order of arrival, retracted requests first, and returns the order of service."""


def fcfs(waiting: Sequence[Req]) -> list[Req]:
    """First come first served; a retracted request keeps its place at the head."""
    return list(waiting)


POLICIES: dict[str, SchedulePolicy] = {"fcfs": fcfs}
