"""What this router knows of the fleets: which nodes live, what each has to do, and which are shunned.

What a node has to do is what its latest Pong says, and what this router has sent to it since. A node's load, links
and cached prefixes are its own (`Node`).

A full decode node gives its next place, a row and pages, away when one of its sequences ends. With few sequences on a
node, the average rate at which places come free says little: all of them may have begun a moment ago. So the wait is
estimated from how long each sequence has had its place, and from how long sequences have kept theirs lately.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.node import Node
from router.dispatch.running_req import Attempt, RunningReq
from shared.log import event
from shared.protocol.messages import Load, ReqKey, Role
from shared.timeline import Clock

FAILURES_TO_OPEN = 3
OPEN_S = 10.0
_FORGET_S = 600.0
"""A node of which nothing has failed for so long has no failures any more."""
_KEPT_STAYS = 64
"""The latest stays that count."""
_MAX_AHEAD = 4096
"""So many sequences ahead of one are counted, since a node may tell any number."""


class Fleet(Protocol):
    """The live nodes. Real: `membership.Membership`."""

    def live(self, role: Role) -> Sequence[Node]:
        """The nodes of a role that take work now."""
        ...

    def why_none(self, role: Role) -> str:
        """Why `live(role)` is empty, in an error for clients."""
        ...


@dataclass(slots=True)
class _Own:
    """This router's part of an amount on one node, and the change of that part since `load` arrived."""

    load: Load
    live: int = 0
    since: int = 0


class Amounts:
    """An amount of each node. What is sent counts at once, so a burst is seen before a Pong."""

    def __init__(self, in_pong: Callable[[Load], int]) -> None:
        self._in_pong = in_pong
        self._own: dict[str, _Own] = {}

    def change(self, node: Node, by: int) -> None:
        """Note that this router has sent `by` more to `node`, or so many fewer are there now."""
        load = node.load
        own = self._own.get(node.ref.incarnation)
        if own is None:
            own = self._own[node.ref.incarnation] = _Own(load)
        if own.load is not load:
            own.load, own.since = load, 0
        own.live += by
        own.since += by

    def lost(self, node: Node) -> None:
        """Forget `node`."""
        self._own.pop(node.ref.incarnation, None)

    def of(self, node: Node) -> int:
        """What all routers have on `node`; the part of others as of its latest Pong."""
        load = node.load
        in_pong = self._in_pong(load)
        own = self._own.get(node.ref.incarnation)
        if own is None:
            return in_pong
        # A Pong does not count what was on its way when it was sent. `live` counts this router's.
        return max(own.live, in_pong + own.since if own.load is load else in_pong)


@dataclass(slots=True)
class _Failures:
    count: int = 0
    last_at: float = 0.0
    shunned_until: float = 0.0


class Suspicion:
    """Which nodes get no new sequences for now: those that fail again and again, and those that try a suspect alone.

    A node that fails FAILURES_TO_OPEN times in a row gets one sequence each OPEN_S, until it has served one to the
    end (the circuit breaker of Nygard, "Release It!"). A node that is started anew keeps its failures. A sequence
    that may be what crashes nodes (`Failover.is_suspect`) is tried on a node that runs nothing else.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, _Failures] = {}
        self.trials: dict[RunningReq, bool] = {}
        """The suspects that are tried now, and whether the node of each has said that it holds nothing else."""

    def shuns(self, node: Node) -> bool:
        """Whether a node should get no new sequences, if there are others."""
        failures = self._failures.get(node.ref.node_id)
        return self.tries_on(node) or (failures is not None and self._clock() < failures.shunned_until)

    def failed(self, node: Node) -> None:
        """Count a failure that a node is to blame for, or the loss of its connection."""
        now = self._clock()
        self._failures = {name: one for name, one in self._failures.items() if now < one.last_at + _FORGET_S}
        failures = self._failures.setdefault(node.ref.node_id, _Failures())
        failures.count += 1
        failures.last_at = now
        if failures.count >= FAILURES_TO_OPEN and now >= failures.shunned_until:
            failures.shunned_until = now + OPEN_S
            event("circuit_open", node=node.ref.incarnation, failures=failures.count, for_s=OPEN_S)

    def sent(self, node: Node) -> None:
        """Let no other sequence follow one that is sent to a node that has failed too often."""
        failures = self._failures.get(node.ref.node_id)
        if failures is not None and failures.count >= FAILURES_TO_OPEN:
            failures.shunned_until = self._clock() + OPEN_S

    def served(self, node: Node) -> None:
        """Forget the failures of a node that has served a sequence to the end."""
        self._failures.pop(node.ref.node_id, None)

    def tries_on(self, node: Node) -> bool:
        """Whether a suspect is tried on `node`."""
        return any(node in req.attempt.holders for req in self.trials)


class FleetView:
    """What a placement is decided by: `suspicion`, and for each node its sequences, queued tokens and used pages.

    A sequence counts on its prefill node until its prompt is computed. Evictable pages are not in use.
    """

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self.suspicion = Suspicion(clock)
        self._clock = clock
        self._places: dict[str, dict[ReqKey, float | None]] = {}
        """This router's attempts on each decode node: when each had its first token."""
        self._stays: deque[float] = deque(maxlen=_KEPT_STAYS)
        self.seqs = Amounts(_seqs_in_pong)
        self.queued_tokens = Amounts(lambda load: load.num_queued_tokens)
        self.used_pages = Amounts(
            lambda load: load.num_pages - load.num_free_pages - load.num_evictable_pages
        )
        self.last = dict.fromkeys(Role, "")
        """The node of each role that was sent the latest sequence."""

    # ------------------------------------------------------------------------------------- the nodes
    def live(self, role: Role) -> Sequence[Node]:
        """The nodes of a role that take work now."""
        return self._fleet.live(role)

    @property
    def nodes(self) -> list[Node]:
        """All nodes that take work now."""
        return [*self.live(Role.PREFILL), *self.live(Role.DECODE)]

    def with_room(self, role: Role, num_tokens: int) -> list[Node]:
        """The nodes on which one sequence may have so many tokens; shunned ones where there are no others."""
        roomy = [node for node in self.live(role) if room(node) >= num_tokens]
        return [node for node in roomy if not self.suspicion.shuns(node)] or roomy

    def why_none(self, role: Role) -> str:
        """Why no node of a role lives, in an error for clients."""
        return self._fleet.why_none(role)

    # ---------------------------------------------------------------------------------- what they do
    def sent(self, attempt: Attempt) -> None:
        """Count an attempt that is sent to its nodes."""
        attempt.is_computing = True
        self.queued_tokens.change(attempt.nodes[0], attempt.num_queued_tokens)
        for node in attempt.nodes:
            self.last[node.role] = node.ref.node_id
            self._change(attempt, node, 1)
            if node.role is Role.DECODE:
                self._places.setdefault(node.ref.incarnation, {})[attempt.key] = None

    def computed(self, attempt: Attempt) -> None:
        """Note that the prompt of an attempt is computed. No-op from the second time on."""
        if attempt.is_computing:
            attempt.is_computing = False
            first = attempt.nodes[0]
            self.queued_tokens.change(first, -attempt.num_queued_tokens)
            if first.role is Role.PREFILL:
                self._change(attempt, first, -1)
            there = self._places.get(attempt.nodes[-1].ref.incarnation, {})
            if attempt.key in there:
                there[attempt.key] = self._clock()

    def ended(self, attempt: Attempt, *, goes_on: bool) -> None:
        """Count an attempt off that has left its nodes. `goes_on`: its sequence does, on others."""
        is_whole = not goes_on and not attempt.key.attempt
        for node in attempt.nodes:
            if node.role is Role.DECODE:
                there = self._places.get(node.ref.incarnation, {})
                began = there.pop(attempt.key, None)
                if began is not None and is_whole:
                    self._stays.append(self._clock() - began)
                if not there:
                    self._places.pop(node.ref.incarnation, None)
                self._change(attempt, node, -1)
        self.computed(attempt)

    def lost(self, node: Node) -> None:
        """Forget `node`, whose sequences have all ended."""
        for amounts in (self.seqs, self.queued_tokens, self.used_pages):
            amounts.lost(node)

    def place_wait_s(self, node: Node, num_pages: int, compute_s: float) -> float:
        """Seconds until a decode node has a row, and `num_pages` pages, for one more sequence.

        It keeps both for `compute_s`, while its prompt is computed, before it has its first token. Sequences take
        places in the order in which they came. Those of other routers are taken to be there like this router's: as
        many have a place as there is room for, and these end one after the other.
        """
        load, num_seqs, used_pages = node.load, self.seqs.of(node), self.used_pages.of(node)
        num_places = node.limits.max_running_requests
        if load.num_bootstrapping:
            num_places = min(num_places, load.num_running + load.num_transferring)
        elif load.num_pages < used_pages + num_pages and used_pages:
            num_places = min(num_places, load.num_pages * num_seqs // used_pages)
        there = self._places.get(node.ref.incarnation, {})
        now = self._clock()
        ages = [now - began for began in there.values() if began is not None]
        num_places = max(num_places, 1, len(ages))
        if num_seqs < num_places:
            return 0.0
        stay_s = sum(self._stays) / len(self._stays) if self._stays else max(ages, default=0.0)
        num_theirs = min(max(num_seqs - len(there), 0), num_places - len(ages))
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

    def _change(self, attempt: Attempt, node: Node, sign: int) -> None:
        self.seqs.change(node, sign)
        self.used_pages.change(node, sign * attempt.num_pages)


def room(node: Node) -> int:
    """Tokens that one sequence may have on a node, prompt and output together."""
    return min(node.limits.context_length, node.limits.max_total_num_tokens)


def _seqs_in_pong(load: Load) -> int:
    return load.num_running + load.num_waiting + load.num_transferring + load.num_bootstrapping


# ------------------------------------------------------------------------------ who waits for a first token
MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer time, and retry sooner."""


class WaitingQueue:
    """A sequence joins when it is dispatched, and leaves with its first token or its end. A second leave is none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._joined_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._joined_at)

    def join(self, rid: str) -> None:
        """Note that a sequence was dispatched."""
        self._joined_at[rid] = self._clock()

    def leave(self, rid: str) -> None:
        """Note that a sequence has its first token, or has ended without one."""
        self._joined_at.pop(rid, None)

    @property
    def wait_s(self) -> float:
        """How long the sequence that came first has waited: about as long as another one will."""
        return self._clock() - next(iter(self._joined_at.values())) if self._joined_at else 0.0


def retry_after_s(wait_s: float) -> int:
    """Whole seconds, within bounds, after which a request that was refused for a wait of `wait_s` may come again."""
    return max(math.ceil(min(wait_s, MAX_RETRY_AFTER_S)), MIN_RETRY_AFTER_S)
