"""Which running requests make room for a waiting one that counts far more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from shared.scheduling.priority import PriorityRule
from shared.scheduling.req import Req


def preemptable(req: Req, running: Sequence[Req], priority: PriorityRule, step: int) -> list[Req]:
    """Those that may be retracted for `req`: least important first, and of equals who loses least, as ever."""
    return sorted(
        (other for other in running if priority.may_preempt(req, other, step)),
        key=lambda r: (priority.level(r, step), r.output_len, -r.num_input_ids, str(r.key)),
    )


def choose_victims(candidates: Sequence[Req], makes_room: Callable[[Sequence[Req]], bool]) -> list[Req]:
    """The first few of `candidates` that make room, without those among them who are not needed for it.

    Empty when even all of them would not: then nobody loses anything for nothing. `makes_room` must not turn
    false when a candidate is added.
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
