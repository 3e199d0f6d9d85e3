"""Changes to a running fleet: an operator adds a node, drains and removes one, or gives one another role.

add          dialled ──▶ works: kept │ refused, unreachable, too slow: forgotten, with an error
remove       no new requests ──▶ running ones move, end, or are sent again when the time is up ──▶ forgotten
change_role  no new requests ──▶ the same ──▶ Drained, by every router ──▶ the node leaves ──▶ dialled in its new role
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.dispatch.dispatcher import Dispatcher
from router.nodes.live_node import LiveNode
from router.nodes.member import Member, MemberState
from router.nodes.membership import Membership
from router.nodes.shared_news import SharedNews
from router.topology import address_of
from shared.errors import RequestError
from shared.log import event
from shared.protocol.messages import (
    AbortedReqs,
    AddedNode,
    Drain,
    Drained,
    Draining,
    Relay,
    RemovedNode,
    Role,
    SetRole,
)

ADD_WAIT_S = 10.0
ANSWER_S = 5.0
_DRAIN_POLL_S = 0.05

_Drained = tuple[int, Role | None]
"""How many of this router's sequences went to other nodes, and the role for which the node has left instead."""


@dataclass(eq=False)
class _Drain:
    """A node that gets no new work. Then it takes another `role`; None: it is removed."""

    until: float
    timeout_s: float
    role: Role | None
    task: asyncio.Task[_Drained]


class FleetChanges:
    """Changes one router's membership, and follows the changes of other routers.

    `abort(rid)` ends requests of this router. A node has `answer_s` to say that it takes a role. `close` cancels
    drains.
    """

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        news: SharedNews,
        abort: Callable[[str | None], object],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._membership = membership
        self._dispatcher = dispatcher
        self._news = news
        self._abort = abort
        self._answer_s = answer_s
        self._drains: dict[Member, _Drain] = {}
        self._emptying: set[asyncio.Task[None]] = set()
        """Of nodes whose processes stop."""

    async def add(self, role: Role, address: str, wait_s: float) -> Member:
        """Dial a node until it is known whether it fits, for at most `wait_s`. A member may be added again.

        A node that does not work is forgotten, unless it was a member before. Raises RequestError with the reason.
        """
        known = self._at(address)
        if known is not None and (known.role is not role or known in self._drains):
            why = "is being drained" if known in self._drains else f"is known as a {known.role} node"
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
            self._news.send(AddedNode(role, address, member.incarnation, time.time()))
            return member
        error = _why_not(member, wait_s)
        if known is None:
            await self._membership.remove(member)
        raise error

    def find(self, name: str) -> Member | None:
        """The member of this id or HOST[:PORT]. Both may be those of two members: a connected one is preferred."""
        found = [m for m in self._membership.members if name == m.node_id or _is_at(m, name)]
        return min(found, key=lambda member: member.node is None, default=None)

    async def remove(self, member: Member, drain_timeout_s: float) -> int:
        """Drain a node, here and at all other routers, and remove it.

        Returns the number of this router's sequences that were sent to other nodes when the time was up.

        The drain continues when the caller is cancelled. A second call for the same node may shorten its time.
        Raises RequestError when the node is added again meanwhile, at another router, or has left for another role.
        """
        if member.node is None and member.next_role is not None:
            raise _becomes(member, member.next_role)
        self._news.send(RemovedNode(member.address, member.incarnation, drain_timeout_s, time.time()))
        removing = self._remove(member, drain_timeout_s)
        try:
            num_failed_over, became = await asyncio.shield(removing)
        except asyncio.CancelledError:
            if not removing.cancelled():
                raise
            why = f"{member.name} stays: it was added again before it was drained"
            raise RequestError(why, status=409, code="node_added") from None
        if became is not None:
            raise _becomes(member, became)
        return num_failed_over

    async def change_role(self, member: Member, role: Role, drain_timeout_s: float, wait_s: float) -> Member:
        """Drain a node, here and at all other routers, and wait until it is back in `role`, with its model loaded.

        The node may take `wait_s` to come back after it was drained. A node that has the role stays as it is. The
        change goes on when the caller is cancelled. A second call may shorten the time. Raises RequestError when the
        node cannot take the role, or does not come back in it.
        """
        if member.role is role and member not in self._drains:
            return member
        why = self._why_not_in(role, member)
        if why or (node := member.node) is None:
            raise _role_stays(member, role, why or "it is not connected")
        self._drain(member, drain_timeout_s, role)  # so no other change counts on this node
        drain = self._drains[member]
        member.next_role = role  # as it will say; a removal waits until it says something else
        answers = await self._membership.call(
            lambda call_id: SetRole(call_id, role, drain_timeout_s), self._answer_s, [node]
        )
        answer = answers[node.ref.node_id]
        left = not answer.call_id and member.state is MemberState.LEFT  # it may have left for this role
        if not answer.ok and not left:
            member.next_role = None
            if drain.role is role and member.node is node:
                self._keep(member)
            may = "" if answer.call_id else "; it may still take the role"
            raise _role_stays(member, role, answer.detail + may)
        return await self._until_back(drain, node, role, drain_timeout_s + wait_s)

    # --------------------------------------------------------------------- changes of other routers
    def on_draining(self, member: Member, draining: Draining) -> None:
        """Drain a member that says it is being drained. One whose process stops hangs up by itself."""
        if draining.stops:
            self._membership.hold(member, "its process is stopping")
            if member.node is not None:
                task = asyncio.create_task(self._empty(member.node), name=f"empty {member.name}")
                self._emptying.add(task)
                task.add_done_callback(self._emptying.discard)
            return
        member.next_role = draining.role
        drain = self._drains.get(member)
        if drain is None or drain.role is not None or draining.role is None:  # else it is being removed since
            self._drain(member, draining.left_s, draining.role)

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
    def _remove(self, member: Member, timeout_s: float) -> asyncio.Task[_Drained]:
        """Drain a member. Its node sends Draining to all routers, and to those that come later."""
        if member.node is not None:
            member.node.send(Drain(timeout_s))
        return self._drain(member, timeout_s)

    def _keep(self, member: Member) -> None:
        """Send new work again to a node that is still drained here, and has been added again or refused a role."""
        drain = self._drains.pop(member, None)
        if drain is not None:
            drain.task.cancel()
        self._membership.keep(member)

    def _drain(
        self, member: Member, drain_timeout_s: float, role: Role | None = None
    ) -> asyncio.Task[_Drained]:
        until = time.monotonic() + drain_timeout_s
        drain = self._drains.get(member)
        if drain is None:
            task = asyncio.create_task(self._until_drained(member), name=f"drain {member.name}")
            drain = self._drains[member] = _Drain(until, drain_timeout_s, role, task)
        elif until < drain.until or role is not drain.role:
            drain.until, drain.timeout_s, drain.role = until, drain_timeout_s, role
        if role is None:
            self._membership.drain(member)
        else:
            self._membership.hold(member, f"it becomes a {role} node")
        return drain.task

    async def _until_drained(self, member: Member) -> _Drained:
        drain = self._drains[member]
        incarnation, told = member.incarnation, None
        num_failed_over = 0
        try:
            while (node := member.node) is not None and member.incarnation == incarnation:
                if time.monotonic() >= drain.until:
                    reason = f"its drain_timeout_s of {drain.timeout_s:g} s has passed"
                    num_failed_over += self._dispatcher.fail_over_held(node, reason)
                if self._dispatcher.num_held(node):
                    self._dispatcher.move_held(node)
                elif drain.role is None:
                    if member.next_role is None:  # else it may be leaving for that role
                        break
                elif told is not node:
                    node.send(Drained())
                    told = node
                await asyncio.sleep(_DRAIN_POLL_S)
            became = member.next_role if drain.role is None else None
            if became is not None:
                self._membership.keep(member)
            elif drain.role is None:
                await self._forget(member, num_failed_over)
        finally:
            if self._drains.get(member) is drain:
                del self._drains[member]
        return num_failed_over, became

    async def _forget(self, member: Member, num_failed_over: int) -> None:
        """Hang up, and ignore the node's announcements until it is restarted."""
        if member.incarnation:
            self._membership.ignore_joins_of(member.incarnation)
        await self._membership.remove(member)
        event("node_removed", node=member.name, address=member.address, num_failed_over=num_failed_over)

    def _why_not_in(self, role: Role, member: Member) -> str:
        """Why a member cannot take another role now; empty when it can."""
        drain = self._drains.get(member)
        if drain is not None:
            return "" if drain.role is role else f"it is being drained ({member.reason})"
        if member.state is not MemberState.ALIVE:
            return f"it is {member.state}" + (f" ({member.reason})" if member.reason else "")
        if member.node is not None and member.node.hello.fixed_role:
            return "it was started with --fixed-role"
        if role is Role.PREFILL and self._membership.live(Role.DECODE) == [member.node]:
            return "no other decode node is alive, and without one nothing can be served"
        return ""

    async def _until_back(self, drain: _Drain, node: LiveNode, role: Role, wait_s: float) -> Member:
        """Wait for the next incarnation of `node`, which is to come at the same address."""
        name, member = node.ref.node_id, None
        try:
            async with asyncio.timeout(wait_s):
                while member is None or member.node is None or member.node.ref == node.ref:
                    if drain.role is not role:
                        why = f"{name} was to be removed before it became a {role} node"
                        raise RequestError(why, status=409, code="node_removed")
                    await self._membership.changed()
                    # A new process may have another address.
                    member = self._at(node.ref.address) or self.find(name)
        except TimeoutError:
            state = f"{member.state} ({member.reason})" if member is not None else "not there"
            why = f"{name} has not come back as a {role} node within {wait_s:g} s: it is {state}"
            raise RequestError(why, status=503, code="node_not_back") from None
        if member.role is not role:
            raise RequestError(
                f"{name} was restarted as a {member.role} node", status=503, code="node_not_back"
            )
        return member

    async def _empty(self, node: LiveNode) -> None:
        """Move what a node holds to others, until it holds nothing or is lost, which makes failovers of the rest."""
        while self._dispatcher.num_held(node):
            self._dispatcher.move_held(node)
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


def _becomes(member: Member, role: Role) -> RequestError:
    why = f"{member.name} stays: it has left to become a {role} node; remove it when it is back"
    return RequestError(why, status=409, code="node_changes_role")


def _role_stays(member: Member, role: Role, why: str) -> RequestError:
    message = f"{member.name} cannot become a {role} node: {why}"
    return RequestError(message, status=409, code="role_not_changed")


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
