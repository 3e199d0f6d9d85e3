"""Finds stop strings in a text that arrives in pieces, at a bounded cost for each character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Stop:
    """A stop in the text: where it ends and begins, and the client's string or pattern.

    The smallest of several stops counts: the one that ends first, and of two with the same end the one that begins
    first. So the result does not depend on how the text was cut into pieces.
    """

    end: int
    start: int
    matched: str


class StopStrings:
    """An Aho-Corasick automaton over the stops of one request. A state is made when a text first reaches it.

    Making all states of many long stops would take long, and texts reach few of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.root = State(0, tuple(stops), None)
        self.first_chars = frozenset(stop[0] for stop in stops)

    def step(self, state: State, char: str) -> State:
        """The state after one more character."""
        made: list[State] = []
        while (after := state.children.get(char)) is None:
            stops = [stop for stop in state.longer if stop[state.depth] == char]
            if stops:
                made.append(state.child(char, stops))
            if state.fail is None:
                after = state
                break
            state = state.fail
        for child in reversed(made):
            child.link(after)
            after = child
        return after


class State:
    """The longest suffix of the text, of `depth` characters, that is a prefix of stops.

    `longer` has those stops with more than `depth` characters. `fail` is the state of the next shorter such suffix.
    `stop` is the longest stop that ends here. `num_held` characters may become part of another stop.
    """

    __slots__ = ("children", "depth", "fail", "longer", "num_held", "stop")

    def __init__(self, depth: int, longer: tuple[str, ...], stop: str | None) -> None:
        self.depth = depth
        self.longer = longer
        self.stop = stop
        self.num_held = depth if longer else 0
        self.fail: State | None = None
        self.children: dict[str, State] = {}

    def child(self, char: str, stops: Sequence[str]) -> State:
        """Add the state after `char`, with which `stops` continue. The caller links it."""
        depth = self.depth + 1
        longer = tuple(stop for stop in stops if len(stop) > depth)
        whole = next((stop for stop in stops if len(stop) == depth), None)
        child = self.children[char] = State(depth, longer, whole)
        return child

    def link(self, fail: State) -> None:
        """Set `fail`. A stop that ends a shorter suffix ends this one too."""
        self.fail = fail
        self.stop = self.stop or fail.stop
        self.num_held = self.num_held or fail.num_held


class StopStringCursor:
    """One text that is searched for StopStrings."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = stops.root
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may become part of a stop."""
        return self._state.num_held

    def feed(self, piece: str, *, armed: bool = True) -> Stop | None:
        """The first stop that `piece` completes; None if not `armed`. A cursor is not fed after a stop."""
        start, self._num_chars = self._num_chars, self._num_chars + len(piece)
        stops, state = self._stops, self._state
        if state is stops.root and stops.first_chars.isdisjoint(piece):
            return None
        for end, char in enumerate(piece, start + 1):
            state = stops.step(state, char)
            if state.stop is not None and armed:
                return Stop(end, end - len(state.stop), state.stop)
        self._state = state
        return None
