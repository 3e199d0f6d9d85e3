"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopScan:
    """What one piece of text led to: text that is safe to show, and the stop string that was completed."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Holds back a tail that may still become a stop string.

    The stop that is completed first wins; of two completed by the same character, the one that began first.
    So the outcome does not depend on how the text was cut into pieces. What was shown can never be part of a
    later match, since every possible beginning of a stop is held back. `keep` leaves the stop in the text.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._keep = keep
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, piece: str) -> StopScan:
        """Take the next piece of text. Not to be called after a match."""
        if not self._stops:
            return StopScan(piece)
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopScan(text[: end if self._keep else start], stop)
        split = self._start_of_possible_stop(text)
        self._held = text[split:]
        return StopScan(text[:split])

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _start_of_possible_stop(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(len(stop) > len(text) - start and stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
