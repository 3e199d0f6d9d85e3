"""The wait for a place on a decode node: a row, and pages for the sequence.

A full node gives its next place away when one of its sequences ends. With few sequences on a node, the average rate
at which places come free says little: all of them may have begun a moment ago. So the wait is estimated from how long
each sequence has had its place, and from how long sequences have kept theirs lately.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from router.dispatch.running_req import Node
from shared.protocol.messages import ReqKey
from shared.timeline import Clock

_KEPT = 64
"""The latest stays that count."""
_MAX_AHEAD = 4096
"""So many sequences ahead of one are counted, since a node may tell any number."""


@dataclass(slots=True)
class _OnNode:
    """This router's sequences on one decode node."""

    waiting: set[ReqKey] = field(default_factory=set)
    """Without a first token: each waits for its place, or for its prompt to be computed."""
    since: dict[ReqKey, float] = field(default_factory=dict)
    """When each of the others had its first token."""


class Places:
    """Which sequences have a place on each decode node, of those that this router has sent there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._on: dict[str, _OnNode] = {}
        self._stays: deque[float] = deque(maxlen=_KEPT)

    def sent(self, node: Node, key: ReqKey) -> None:
        """An attempt was sent to `node`."""
        self._on.setdefault(node.ref.incarnation, _OnNode()).waiting.add(key)

    def began(self, node: Node, key: ReqKey) -> None:
        """An attempt has its first token. No-op for one that has ended."""
        on = self._on.get(node.ref.incarnation)
        if on is not None and key in on.waiting:
            on.waiting.remove(key)
            on.since[key] = self._clock()

    def ended(self, node: Node, key: ReqKey, *, is_whole: bool) -> None:
        """An attempt has left `node`. Its stay tells how long others last if its whole sequence was there."""
        on = self._on.get(node.ref.incarnation)
        if on is None:
            return
        on.waiting.discard(key)
        since = on.since.pop(key, None)
        if since is not None and is_whole:
            self._stays.append(self._clock() - since)
        if not on.waiting and not on.since:
            del self._on[node.ref.incarnation]

    def wait_s(self, node: Node, num_seqs: int, num_places: int, compute_s: float) -> float:
        """Seconds until one more sequence has a place on `node`, where all routers have `num_seqs` sequences.

        They take the `num_places` in the order in which they came, and keep one while their prompts are computed as
        well, each for `compute_s`. Those of other routers are taken to be there like this router's: as many have a
        place as there is room for, and these end one after the other.
        """
        on = self._on.get(node.ref.incarnation) or _OnNode()
        num_places = max(num_places, len(on.since))
        if num_seqs < num_places:
            return 0.0
        now = self._clock()
        ages = [now - since for since in on.since.values()]
        stay_s = sum(self._stays) / len(self._stays) if self._stays else max(ages, default=0.0)
        num_others = max(num_seqs - len(ages) - len(on.waiting), 0)
        num_theirs = min(num_others, num_places - len(ages))
        ends = [self._left_s(age, stay_s) for age in ages]
        ends += [stay_s * (i + 1) / (num_theirs + 1) for i in range(num_theirs)]
        ends += [0.0] * (num_places - len(ends))
        heapq.heapify(ends)
        for _ in range(min(num_seqs - len(ages) - num_theirs, _MAX_AHEAD)):
            heapq.heapreplace(ends, ends[0] + compute_s + stay_s)
        return ends[0]

    def _left_s(self, age_s: float, stay_s: float) -> float:
        """How much longer a sequence stays: as those of the latest that had stayed for `age_s` as well.

        If none has, the sequence stays as long again, and at least `stay_s`.
        """
        longer = [stay for stay in self._stays if stay > age_s]
        return sum(longer) / len(longer) - age_s if longer else max(age_s, stay_s)
