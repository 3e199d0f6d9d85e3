"""Finds stop strings in text that arrives in pieces, at a bounded cost for each character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Stop:
    """A stop that is complete: where it ends and begins in the text, and what the client gave, string or pattern.

    The least of several wins: what is completed first, and of two with the same end, what began first. So it does not
    depend on how the text was cut into pieces.
    """

    end: int
    start: int
    matched: str


class StopStrings:
    """An automaton (Aho-Corasick's) over the stops of one request, made state by state as texts need it.

    Many long stops would take long to compile, and of their states texts see next to none.
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
    """The longest end of a text, `depth` characters, that is a beginning of stops; those of them with more: `longer`.

    `fail` is the state of the next shorter such end. `stop` is the longest that has just been completed. `num_held`
    characters may become part of another.
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
        """A new state after `char`, which `stops` go on with; still to be linked."""
        depth = self.depth + 1
        longer = tuple(stop for stop in stops if len(stop) > depth)
        whole = next((stop for stop in stops if len(stop) == depth), None)
        child = self.children[char] = State(depth, longer, whole)
        return child

    def link(self, fail: State) -> None:
        """What is true of the shorter end is true of this one too."""
        self.fail = fail
        self.stop = self.stop or fail.stop
        self.num_held = self.num_held or fail.num_held


class StopStringCursor:
    """One text that goes through StopStrings."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = stops.root
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may become part of a stop; exact."""
        return self._state.num_held

    def feed(self, piece: str, *, armed: bool = True) -> Stop | None:
        """The first stop that `piece` completes; if not `armed`, none. Not to be called after one."""
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
