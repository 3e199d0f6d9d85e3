"""What this router knows of the fleets: which nodes live, what each has to do, and which are shunned.

What a node has to do is what its latest Pong says, and what this router has sent to it since. A node's load, links
and cached prefixes are its own (`Node`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.places import Places
from router.dispatch.running_req import Attempt, Node
from router.dispatch.suspicion import Suspicion
from shared.protocol.messages import Load, Role
from shared.timeline import Clock


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


class FleetView:
    """What a placement is decided by: `suspicion`, and for each node its sequences, queued tokens and used pages.

    A sequence counts on its prefill node until its prompt is computed. Evictable pages are not in use.
    """

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self.suspicion = Suspicion(clock)
        self.places = Places(clock)
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

    @property
    def prefilling(self) -> Sequence[Node]:
        """The nodes that compute prompts: the prefill nodes, or the decode nodes where there are none."""
        return self.live(Role.PREFILL) or self.live(Role.DECODE)

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
                self.places.sent(node, attempt.key)

    def computed(self, attempt: Attempt) -> None:
        """Note that the prompt of an attempt is computed. No-op from the second time on."""
        if attempt.is_computing:
            attempt.is_computing = False
            first = attempt.nodes[0]
            self.queued_tokens.change(first, -attempt.num_queued_tokens)
            if first.role is Role.PREFILL:
                self._change(attempt, first, -1)
            self.places.began(attempt.nodes[-1], attempt.key)

    def ended(self, attempt: Attempt, *, goes_on: bool) -> None:
        """Count an attempt off that has left its nodes. `goes_on`: its sequence does, on others."""
        is_whole = not goes_on and not attempt.key.attempt
        for node in attempt.nodes:
            if node.role is Role.DECODE:
                self.places.ended(node, attempt.key, is_whole=is_whole)
                self._change(attempt, node, -1)
        self.computed(attempt)

    def lost(self, node: Node) -> None:
        """Forget `node`, whose sequences have all ended."""
        for amounts in (self.seqs, self.queued_tokens, self.used_pages):
            amounts.lost(node)

    def place_wait_s(self, node: Node, num_pages: int, compute_s: float) -> float:
        """Seconds until a decode node has a row, and `num_pages` pages, for one more sequence.

        It keeps both for `compute_s`, while its prompt is computed, before it has its first token.
        """
        load, num_seqs, used_pages = node.load, self.seqs.of(node), self.used_pages.of(node)
        num_places = node.limits.max_running_requests
        if load.num_bootstrapping:
            num_places = min(num_places, load.num_running + load.num_transferring)
        elif load.num_pages < used_pages + num_pages and used_pages:
            num_places = min(num_places, load.num_pages * num_seqs // used_pages)
        num_places = max(num_places, 1)
        return self.places.wait_s(node, num_seqs, num_places, compute_s)

    def _change(self, attempt: Attempt, node: Node, sign: int) -> None:
        self.seqs.change(node, sign)
        self.used_pages.change(node, sign * attempt.num_pages)


def room(node: Node) -> int:
    """Tokens that one sequence may have on a node, prompt and output together."""
    return min(node.limits.context_length, node.limits.max_total_num_tokens)


def _seqs_in_pong(load: Load) -> int:
    return load.num_running + load.num_waiting + load.num_transferring + load.num_bootstrapping
