"""Changes to a running fleet: an operator adds a node, or drains and removes one.

add      dialled ──▶ works: kept │ refused, unreachable, too slow: forgotten, with an error
remove   no new requests ──▶ running ones move, end, or are sent again when the time is up ──▶ disconnected, forgotten
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.running_req import Node
from router.http.topology import address_of
from router.nodes.member import Member, MemberState
from router.nodes.membership import Membership
from router.nodes.node_link import LiveNode
from router.nodes.shared_news import SharedNews
from shared.errors import RequestError
from shared.log import event
from shared.protocol.messages import AbortedReqs, AddedNode, Drain, Draining, Relay, RemovedNode, Role

ADD_WAIT_S = 10.0
_DRAIN_POLL_S = 0.05


class HeldReqs(Protocol):
    """The sequences that nodes hold. Real: `dispatch.Dispatcher`."""

    def num_held(self, node: Node) -> int:
        """The number of sequences that `node` holds."""
        ...

    def move_held(self, node: Node) -> None:
        """Begin to move the sequences that `node` holds to other nodes, a few at a time."""
        ...

    def fail_over_held(self, node: Node, reason: str) -> int:
        """Send the sequences that `node` holds to other nodes and cancel them there; returns their number."""
        ...


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A node that was removed, and how many of this router's sequences went to other nodes for that."""

    node_id: str
    address: str
    num_failed_over: int


@dataclass(eq=False)
class _Drain:
    until: float
    timeout_s: float
    task: asyncio.Task[Removed]


class FleetChanges:
    """Changes one router's membership, and follows the changes of other routers (a `membership.FleetEvents`).

    `abort(rid)` ends requests of this router. `close` cancels drains.
    """

    def __init__(
        self, membership: Membership, reqs: HeldReqs, news: SharedNews, abort: Callable[[str | None], object]
    ) -> None:
        self._membership = membership
        self._reqs = reqs
        self._news = news
        self._abort = abort
        self._drains: dict[Member, _Drain] = {}
        self._emptying: set[asyncio.Task[None]] = set()
        """Of nodes whose processes stop."""

    async def add(self, role: Role, address: str, wait_s: float) -> Member:
        """Dial a node until it is known whether it fits, for at most `wait_s`. A member may be added again.

        A node that does not work is forgotten, unless it was a member before. Raises RequestError with the reason.
        """
        known = self._at(address)
        if known is not None and (known.role is not role or known.leaving):
            why = "is being drained" if known.leaving else f"is known as a {known.role} node"
            raise RequestError(f"{address} {why}", param="address")
        member = known or self._membership.dial(address, role, pinned=True)
        if member is None:
            raise RequestError("no more nodes can be taken in", status=503, code="too_many_nodes")
        member.resume = True
        if known is not None and known.node is None:
            self._membership.redial(known)
        await self._until_known(member, wait_s)
        member.resume = False
        if member.state is MemberState.ALIVE:
            member.pinned = True
            self._membership.accept_joins_of(member.incarnation)
            self._news.send(AddedNode(role, address, member.incarnation, self._news.next_time(address)))
            return member
        error = _why_not(member, wait_s)
        if known is None:
            await self._membership.remove(member)
        raise error

    def find(self, name: str) -> Member | None:
        """The member of this id or HOST[:PORT]. Both may be those of two members: a connected one is preferred."""
        found = [m for m in self._membership.members if name == m.node_id or _is_at(m, name)]
        return min(found, key=lambda member: member.node is None, default=None)

    async def remove(self, member: Member, drain_timeout_s: float) -> Removed:
        """Drain a node, here and at all other routers, and remove it.

        The drain continues when the caller is cancelled. A second call for the same node may shorten its time.
        Raises RequestError when the node is added again meanwhile, at another router.
        """
        at = self._news.next_time(member.address)
        self._news.send(RemovedNode(member.address, member.incarnation, drain_timeout_s, at))
        removing = self._remove(member, drain_timeout_s)
        try:
            return await asyncio.shield(removing)
        except asyncio.CancelledError:
            if not removing.cancelled():
                raise
            why = f"{member.name} stays: it was added again before it was drained"
            raise RequestError(why, status=409, code="node_added") from None

    # --------------------------------------------------------------------- changes of other routers
    def on_alive(self, node: LiveNode) -> None:
        """Send a node that has come the nodes that operators have added."""
        self._news.send_current(node)

    def on_draining(self, member: Member, draining: Draining) -> None:
        """Drain a member that says it is being drained. One whose process stops hangs up by itself."""
        if draining.stops:
            self._membership.stops(member)
            if member.node is not None:
                task = asyncio.create_task(self._empty(member.node), name=f"empty {member.name}")
                self._emptying.add(task)
                task.add_done_callback(self._emptying.discard)
            return
        self._news.forget_added(member.address, draining.left_s)
        self._drain(member, draining.left_s)

    def on_relay(self, relay: Relay) -> None:
        """Do here what another router has done."""
        match self._news.take(relay):
            case AbortedReqs(rid):
                self._abort(rid)
            case AddedNode(role, address, incarnation):
                self._membership.accept_joins_of(incarnation)
                member = self._membership.dial(address, role, pinned=True)
                if member is not None:
                    member.pinned = True
                    if member.leaving:
                        self._keep(member)
            case RemovedNode(address, incarnation, drain_timeout_s):
                if incarnation:
                    self._membership.ignore_joins_of(incarnation)  # the node may announce itself here later
                member = self._at(address) if address else None
                if member is not None:
                    self._remove(member, drain_timeout_s)

    async def close(self) -> None:
        """Cancel everything that still waits."""
        tasks = [*(drain.task for drain in self._drains.values()), *self._emptying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ inside
    def _remove(self, member: Member, timeout_s: float) -> asyncio.Task[Removed]:
        """Drain a member. Its node sends Draining to all routers, and to those that come later."""
        if member.node is not None:
            member.node.send(Drain(timeout_s))
        return self._drain(member, timeout_s)

    def _keep(self, member: Member) -> None:
        """Send new work again to a node that is still drained here, and has been added again elsewhere."""
        drain = self._drains.pop(member, None)
        if drain is not None:
            drain.task.cancel()
        self._membership.keep(member)

    def _drain(self, member: Member, drain_timeout_s: float) -> asyncio.Task[Removed]:
        until = time.monotonic() + drain_timeout_s
        drain = self._drains.get(member)
        if drain is None:
            task = asyncio.create_task(self._until_drained(member), name=f"drain {member.name}")
            drain = self._drains[member] = _Drain(until, drain_timeout_s, task)
            self._membership.drain(member)
        elif until < drain.until:
            drain.until, drain.timeout_s = until, drain_timeout_s
        return drain.task

    async def _until_drained(self, member: Member) -> Removed:
        drain = self._drains[member]
        num_failed_over = 0
        try:
            while (node := member.node) is not None and self._reqs.num_held(node):
                if time.monotonic() >= drain.until:
                    reason = f"its drain_timeout_s of {drain.timeout_s:g} s has passed"
                    num_failed_over = self._reqs.fail_over_held(node, reason)
                    break
                self._reqs.move_held(node)
                await asyncio.sleep(_DRAIN_POLL_S)
            if member.incarnation:
                self._membership.ignore_joins_of(member.incarnation)
            await self._membership.remove(member)
        finally:
            if self._drains.get(member) is drain:
                del self._drains[member]
        event("node_removed", node=member.name, address=member.address, num_failed_over=num_failed_over)
        return Removed(
            node_id=member.node_id,
            address=member.address,
            num_failed_over=num_failed_over,
        )

    async def _empty(self, node: LiveNode) -> None:
        """Move what a node holds to others, until it holds nothing or is lost, which makes failovers of the rest."""
        while self._reqs.num_held(node):
            self._reqs.move_held(node)
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _until_known(self, member: Member, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while member.state is MemberState.DIALLING:
                    await self._membership.changed()
        except TimeoutError:
            return  # still dialling

    def _at(self, address: str) -> Member | None:
        return next((m for m in self._membership.members if m.address == address), None)


def _is_at(member: Member, text: str) -> bool:
    try:
        return member.address == address_of(member.role, text)
    except ValueError:
        return False  # an id may have characters that an address has not


def _why_not(member: Member, wait_s: float) -> RequestError:
    name = f"{member.node_id} at {member.address}" if member.node_id else member.address
    match member.state:
        case MemberState.REFUSED:
            return RequestError(
                f"{name} does not fit here: {member.reason}", param="address", code="node_refused"
            )
        case MemberState.DIALLING:
            why = f"no answer within {wait_s:g} s"
        case _:
            why = member.reason
    return RequestError(f"{name} cannot be reached: {why}", param="address", code="node_unreachable")
