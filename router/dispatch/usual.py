"""How long a piece of work usually takes on a node or a link, learned from the requests that this router has sent.

The node's own average rate would not do: a forward has a fixed cost, so that a short prompt takes longer than its
tokens at the rate of long prompts. Work is therefore compared with work of its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

_KEPT = 16
"""Durations of one size class, of which the usual one is the median."""
_LEAST = 4
"""With fewer, the usual duration is unknown."""
_SPACING_S = 20.0
"""Once there are that many, one more is kept each so many seconds. So the usual duration spans more than five
minutes, and an incident has to last for more than two before it is the usual."""

_Place = tuple[Hashable, ...]


class UsualDurations:
    """By place, a tuple that names a stage and the incarnations of its nodes. A lookup is two dictionary accesses."""

    def __init__(self) -> None:
        self._classes: dict[_Place, dict[int, _SizeClass]] = {}

    def observe(self, place: _Place, work: int, seconds: float, now: float) -> None:
        """Note that `work` (tokens or bytes, at least 0) took `seconds` and was done at `now`."""
        self._classes.setdefault(place, {}).setdefault(_size(work), _SizeClass()).observe(
            seconds / max(work, 1), now
        )

    def usual_s(self, place: _Place, work: int) -> float | None:
        """The seconds that `work` usually takes, in proportion to work of at most twice and at least half its size.

        None while too little such work is known.
        """
        known = self._classes.get(place, {}).get(_size(work))
        return None if known is None or known.usual is None else known.usual * max(work, 1)

    def forget(self, incarnation: str) -> None:
        """Drop what is known of a node that is gone, and of its links."""
        for place in [place for place in self._classes if incarnation in place]:
            del self._classes[place]


class _SizeClass:
    __slots__ = ("_kept", "_kept_at", "usual")

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_KEPT)
        self._kept_at = 0.0
        self.usual: float | None = None
        """Seconds for one unit of work."""

    def observe(self, seconds: float, now: float) -> None:
        if len(self._kept) >= _LEAST and now < self._kept_at + _SPACING_S:
            return
        self._kept.append(seconds)
        self._kept_at = now
        if len(self._kept) >= _LEAST:
            self.usual = median(self._kept)


def _size(work: int) -> int:
    return work.bit_length()
