"""When a fleet gets more nodes or one less: a decision is a value, made of what was seen and of the time.

demand ──▶ more than the nodes that live or come ──▶ Add, unless a node was drained within settle_s
       └─▶ at most `low` of one node less, for all of window_s ──▶ Drain, unless a node came within settle_s

Nodes that were asked for, are loading or are away for a moment count as coming, each for a bounded time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from planner.autoscaler.capacity import CATCH_UP_S, Capacity, Demand, Work
from shared.protocol.messages import Role

RATE_S = 30.0
"""Rates are those of so many seconds."""
_MAX_GAPS = 4
"""So many intervals without a look, such as while a router is restarted, and a window begins anew."""
_REMEMBERED_S = 600.0
"""A node may still come so long after it was given up."""
_ROUNDING = 1e-6


class NodeBounds(msgspec.Struct, frozen=True):
    """How few and how many nodes of a role there may be."""

    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How soon a fleet changes. Seconds."""

    start_s: float
    """Until a node that is asked for lives."""
    settle_s: float = 60.0
    """No two opposite actions are closer, and no two nodes are drained closer. An Add may follow an Add at once,
    unless that has not been carried out yet."""
    window_s: float = 300.0
    """For so long one node less must have sufficed before a node is drained."""
    low: float = 0.8
    """Sufficed: it would have been used at most so far of what it takes within the SLO."""
    interval_s: float = 5.0
    """Between two looks at the fleet."""

    @property
    def start_limit_s(self) -> float:
        """A node that has not come after this time no longer counts as coming."""
        return 2 * self.start_s + 60.0

    @property
    def recovery_s(self) -> float:
        """After a step in load, the SLO is met again within this time if the nodes allowed can do that.

        A node may just have been drained; the rate is known after RATE_S; nodes start, and catch up with what waits.
        Where `most` nodes leave little to spare, what waits takes them longer than CATCH_UP_S.
        """
        return self.settle_s + RATE_S + 2 * self.interval_s + self.start_s + CATCH_UP_S


class NodeState(StrEnum):
    """Of a node, for the autoscaler."""

    LIVE = "live"
    COMING = "coming"
    """Loading, dialled, or lost and dialled again."""
    DRAINING = "draining"


class NodeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a fleet."""

    node_id: str
    state: NodeState
    num_reqs: int = 0
    num_cached_pages: int = 0


class FleetSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one role, each id once, and their work; None while its rates are not known."""

    nodes: tuple[NodeSeen, ...]
    work: Work | None
    elsewhere: frozenset[str] = frozenset()
    """Ids of the nodes that have the other role."""


class Add(msgspec.Struct, frozen=True):
    """Start so many nodes."""

    num_nodes: int


class Drain(msgspec.Struct, frozen=True):
    """Drain this node, and stop it when it is empty."""

    node_id: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now."""

    action: Add | Drain | None
    reason: str
    """In words, with the figures."""
    demand: float | None
    num_live: int
    num_coming: int
    num_overdue: int = 0
    """Nodes that were asked for and have been given up now."""


@dataclass(eq=False)
class Autoscaler:
    """Decides for the nodes of one role. `decide` is called with times that grow, every `interval_s` or so.

    Nodes of `keep` are never drained. Nodes that others add or drain count for the settling time as if it had
    been done here.
    """

    role: Role
    bounds: NodeBounds
    pace: Pace
    capacity: Capacity
    keep: frozenset[str] = frozenset()
    _began_at: float | None = None
    _orders: deque[float] = field(default_factory=deque)
    """When each node was asked for that may be on its way."""
    _overdue: deque[float] = field(default_factory=deque)
    """When nodes were asked for that have been given up and may still come."""
    _doubts: deque[float] = field(default_factory=deque)
    """The same of nodes that seem to have come. Each has, or else the order has that is as old among `_orders`."""
    _met: set[str] = field(default_factory=set)
    """Nodes that have lived here and were not drained."""
    _away_since: dict[str, float] = field(default_factory=dict)
    _lost: dict[str, float] = field(default_factory=dict)
    """When nodes that had lived here were given up, which may come back."""
    _asked: set[str] = field(default_factory=set)
    """Nodes to be drained, which do not say yet that they are."""
    _draining: set[str] = field(default_factory=set)
    _came_at: float = -math.inf
    _drained_at: float = -math.inf
    _looked_at: float = -math.inf
    _watched_since: float = math.inf
    _demands: deque[tuple[float, float]] = field(default_factory=deque)

    def decide(self, now: float, seen: FleetSeen) -> Decision:
        """Look at the fleet, and say what to do about it. An action is taken to be carried out, see `add_failed`."""
        if self._began_at is None:
            self._began_at = now
        num_overdue = self._follow(now, seen)
        live = [
            node for node in seen.nodes if node.state is NodeState.LIVE and node.node_id not in self._asked
        ]
        coming_s, num_doubtful = self._coming(now)
        demand = None
        if seen.work is not None:
            demand = self.capacity.demand(
                seen.work, is_decode=self.role is Role.DECODE, num_live=len(live), coming_s=coming_s
            )
        self._remember(now, demand)
        action, why = self._action(now, live, len(coming_s), num_doubtful, demand)
        if isinstance(action, Add):
            self._orders.extend([now] * action.num_nodes)
            self._came_at = now
        elif isinstance(action, Drain):
            self._drained_at = now
            self._asked.add(action.node_id)
            self._met.discard(action.node_id)
        return Decision(
            action=action,
            reason=f"{why} ({demand.words})" if demand is not None else why,
            demand=None if demand is None else round(demand.nodes, 3),
            num_live=len(live),
            num_coming=len(coming_s),
            num_overdue=num_overdue,
        )

    def add_failed(self, num_nodes: int, asked_at: float) -> None:
        """So many nodes that were asked for then will not come."""
        for _ in range(num_nodes):
            if asked_at in self._orders:
                index = self._orders.index(asked_at)
                del self._orders[index]
                if index < len(self._doubts):
                    del self._doubts[index]
            elif asked_at in self._overdue:
                self._overdue.remove(asked_at)

    def add_done(self, num_nodes: int, asked_at: float, now: float) -> None:
        """So many nodes that were asked for then start only now. No Add has been decided on meanwhile."""
        for _ in range(num_nodes):
            if asked_at in self._orders:
                self._orders[self._orders.index(asked_at)] = now
            elif asked_at in self._overdue:
                self._overdue.remove(asked_at)
                self._orders.append(now)

    def drain_failed(self, node_id: str) -> None:
        """A node that was to be drained stays."""
        self._asked.discard(node_id)
        self._met.add(node_id)

    # ------------------------------------------------------------------------------------------ inside
    def _follow(self, now: float, seen: FleetSeen) -> int:
        """Notice what has come and gone. Returns the number of orders that are given up."""
        start_limit_s = self.pace.start_limit_s
        while self._overdue and now - self._overdue[0] >= start_limit_s + _REMEMBERED_S:
            self._overdue.popleft()
        self._lost = {node_id: at for node_id, at in self._lost.items() if now - at < _REMEMBERED_S}
        states = {node.node_id: node.state for node in seen.nodes}
        for node_id, state in states.items():
            if state is NodeState.LIVE and node_id not in self._met and node_id not in self._asked:
                self._met.add(node_id)
                if now != self._began_at:
                    self._came_at = now
                if self._lost.pop(node_id, None) is None and node_id not in self._draining:
                    self._has_come()  # else it is an old one, which is back or stays after all
            elif state is NodeState.DRAINING and node_id not in self._draining:
                self._met.discard(node_id)
                self._drained_at = now
        if changed := self._met & seen.elsewhere - states.keys():
            self._met -= changed  # they were drained by others, perhaps between two looks
            self._drained_at = now
        self._draining = {node_id for node_id, state in states.items() if state is NodeState.DRAINING}
        self._asked = {i for i in self._asked if states.get(i) is NodeState.LIVE}
        away = {i for i, state in states.items() if state is NodeState.COMING} | (self._met - states.keys())
        self._away_since = {node_id: self._away_since.get(node_id, now) for node_id in sorted(away)}
        for node_id, since in self._away_since.items():
            if now - since >= start_limit_s and node_id in self._met:
                self._met.discard(node_id)
                self._lost[node_id] = now
        late = [self._orders.popleft() for at in list(self._orders) if now - at >= start_limit_s]
        doubts = [self._doubts.popleft() for _ in range(min(len(self._doubts), len(late)))]
        # One node of each doubt may still come. It is forgotten when that of the doubt is, or there might be no end.
        self._overdue = deque((*doubts, *self._overdue, *late[len(doubts) :]))
        return len(late) - len(doubts)

    def _has_come(self) -> None:
        """Count a new node as the one that was given up first, else as the one that was asked for first.

        It cannot be seen which of them it is. So where one had been given up, the oldest order that was not in doubt
        is now: it no longer counts as coming, but keeps its place until it is given up, too.
        """
        if self._overdue:
            self._doubts.append(self._overdue.popleft())
        elif self._orders:
            self._orders.popleft()
        while len(self._doubts) > len(self._orders):
            self._doubts.pop()

    def _coming(self, now: float) -> tuple[list[float], int]:
        """Seconds until each node comes that was asked for, is new, or has been away for a while.

        And how many more may come, since those that are new may be ones that had been given up.
        """
        start_s, limit_s = self.pace.start_s, self.pace.start_limit_s
        since = {node_id: at for node_id, at in self._away_since.items() if now - at < limit_s}
        known = self._met | self._lost.keys()
        back = [at for node_id, at in since.items() if node_id in known]
        new = [at for node_id, at in since.items() if node_id not in known]
        ordered = list(self._orders)[len(self._doubts) :]  # the new ones are among those, as far as they go
        expected = [*ordered, *new[len(ordered) :]]
        most = max(len(self._orders) + min(len(self._overdue), len(new)), len(new))
        return [max(0.0, at + start_s - now) for at in (*back, *expected)], most - len(expected)

    def _remember(self, now: float, demand: Demand | None) -> None:
        """Keep the demands of the window, of which the first is the largest: those below a later one are dropped.

        A window in which nothing was seen for a while begins anew.
        """
        gap_s, self._looked_at = now - self._looked_at, now
        if demand is None or gap_s > _MAX_GAPS * self.pace.interval_s:
            self._demands.clear()
            self._watched_since = now
        if demand is None:
            return
        most = max(demand.nodes, demand.floor)
        while self._demands and self._demands[-1][1] <= most:
            self._demands.pop()
        self._demands.append((now, most))
        while self._demands[0][0] < now - self.pace.window_s:
            self._demands.popleft()

    def _action(
        self, now: float, live: list[NodeSeen], num_coming: int, num_doubtful: int, demand: Demand | None
    ) -> tuple[Add | Drain | None, str]:
        pace, bounds, num_live = self.pace, self.bounds, len(live)
        assert self._began_at is not None
        if not self._met and now - self._began_at < pace.start_limit_s:
            return None, "waits for the first node, since a fleet that starts brings its nodes by itself"
        if now - self._began_at < pace.settle_s:
            return None, f"looks at the fleet for {pace.settle_s:g} s first"
        needed = 0 if demand is None else math.ceil(demand.nodes - _ROUNDING)
        wanted = min(max(needed, bounds.least), bounds.most)
        has = f"{num_live} live" + (f", {num_coming} on their way" if num_coming else "")
        words = f"{_nodes(needed)} needed, {has}" if demand is not None else has
        if needed < bounds.least:
            words += f"; at least {bounds.least} are wanted"
        if num_live + num_coming < wanted:
            num_leaving = len(self._draining | self._asked)
            room = bounds.most - num_live - num_coming - num_leaving - num_doubtful
            if room <= 0 and not num_leaving:
                return None, f"{words}: {_nodes(num_doubtful)} more may come, late"
            if room <= 0:
                return None, f"{words}: waits until {_nodes(num_leaving)} being drained has left"
            if now - self._drained_at < pace.settle_s:
                return None, f"{words}: a node was drained less than {pace.settle_s:g} s ago"
            return Add(min(wanted - num_live - num_coming, room)), words
        if needed > bounds.most:
            words += f"; at most {bounds.most} are allowed"
        why_not = self._why_no_drain(now, num_live, num_coming, demand)
        if why_not:
            return None, f"{words}{why_not}"
        candidates = [node for node in live if node.node_id not in self.keep]
        if not candidates:
            return None, f"{words}; none of the nodes may be drained"
        emptiest = min(candidates, key=lambda node: (node.num_reqs, node.num_cached_pages, node.node_id))
        if num_live > bounds.most:
            return Drain(emptiest.node_id), f"{words}; at most {bounds.most} are allowed"
        most = self._demands[0][1]
        return Drain(emptiest.node_id), (
            f"{words}: at most {most:.2f} for {pace.window_s:g} s, "
            f"which {_nodes(num_live - 1)} would do at {pace.low:.0%} of the target"
        )

    def _why_no_drain(self, now: float, num_live: int, num_coming: int, demand: Demand | None) -> str:
        """Why no node is drained now, as words to be added; empty if one may be."""
        pace, bounds = self.pace, self.bounds
        least = max(1, bounds.least)  # the last one of a role stays whatever the bounds say
        if num_live <= least:
            return f"; at least {least} stay"
        if num_coming or self._draining or self._asked:
            return "; nodes are on their way or being drained"
        if now - max(self._came_at, self._drained_at) < pace.settle_s:
            return f"; the fleet has changed less than {pace.settle_s:g} s ago"
        if num_live > bounds.most:
            return ""
        if demand is None or now - self._watched_since < pace.window_s:
            return f"; looks for {pace.window_s:g} s before a node is drained"
        if self._demands[0][1] > pace.low * (num_live - 1):
            return f"; up to {self._demands[0][1]:.2f} within {pace.window_s:g} s"
        return ""


def _nodes(num: int) -> str:
    return f"{num} node" if num == 1 else f"{num} nodes"
