"""The members of the fleet: Membership dials nodes, checks that they fit together, and notices when they are gone.

    Member (an address)   DIALLING ──hello──▶ ALIVE ──closed, silent──▶ LOST ──1 s──▶ dialled again
                             │                  ├──leaks──▶ DRAINING until it is restarted      (new identity)
                             │                  ├──changes its role──▶ DRAINING ──▶ LEFT ──▶ dialled again
                             │                  └──removed──▶ DRAINING ──▶ hung up, forgotten
                             └──layout differs──▶ REFUSED ──5 s──▶ dialled again

A node that announced itself (`Join`) and is lost for long is forgotten, since it will announce itself again. A node
that the operator named is dialled for ever. A node that was restarted, or has changed its role, is a new incarnation,
and so a new node. The role in its hello counts, not the one in which it was dialled. Announcements of an incarnation
that the operator removed are ignored; those of the next incarnation are not.

A discovery says which addresses there are. One that it newly lists is dialled, and dialled again when it is lost; one
that it lists no more stays as long as it answers. An address that the operator removed is dialled again when it has
been off the list. One for which there is no room is dialled when a later listing finds room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import zmq.asyncio

from router.dispatch.node import Loss
from router.nodes.live_node import LiveNode, NodeLost, Timing
from router.nodes.member import Member, MemberState, raise_if_different, raise_if_impossible
from router.nodes.node_link import NodeLink, Refusal
from shared.errors import LinkError
from shared.log import LimitedWarning, crash, event
from shared.protocol.messages import (
    Announcement,
    Answered,
    Draining,
    Join,
    Leaving,
    LoadFailed,
    Loading,
    NodeHello,
    NodeRef,
    Peers,
    Pong,
    Relay,
    Role,
    RouterToNode,
)
from shared.protocol.resolver import Resolver, does_not_resolve

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher
    from router.nodes.fleet_changes import FleetChanges
    from shared.protocol.security import FleetKey

MAX_MEMBERS = 1024
_MAX_REMOVED = 4096


class Membership:
    """All members. Runs on the router's loop; `close` ends every task and socket."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        incarnation: str,
        fleet_key: FleetKey | None,
        timing: Timing,
        resolver: Resolver,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        self._max_members = max_members
        self._resolver = resolver
        self._context = context
        self._incarnation = incarnation
        self._fleet_key = fleet_key
        self._timing = timing
        self._listeners: tuple[Dispatcher, FleetChanges] | None = None
        self._loading: dict[str, tuple[float, Loading]] = {}
        self._members: list[Member] = []
        self._connected: list[Member] = []
        """Those with a node, longest-lived first: kept in order, since every request reads them several times."""
        self._live: dict[Role, list[LiveNode]] = {}
        self._listed: frozenset[str] = frozenset()
        self._removed: dict[str, None] = {}
        """Incarnations that the operator removed, the oldest first: their announcements are ignored."""
        self._dials = itertools.count(1)
        self._fingerprint: str | None = None
        self.is_new = True
        """True until a node is admitted or removed, since nodes may not have announced themselves yet."""
        self._member_ignored = LimitedWarning("member_ignored")
        self._node_failed_to_load = LimitedWarning("node_failed_to_load")
        self._change = asyncio.Event()
        self._closed = False

    # ---------------------------------------------------------------------------------------- reading
    @property
    def members(self) -> Sequence[Member]:
        """Every member, connected or not."""
        return self._members

    @property
    def loading(self) -> list[Loading]:
        """The latest announcement of each node that is loading. A node that says nothing more has died."""
        since = time.monotonic() - self._timing.loading_s
        return [message for at, message in self._loading.values() if at > since]

    def live(self, role: Role) -> Sequence[LiveNode]:
        """The nodes of a role that take work now, longest-lived first."""
        return self._live.get(role, ())

    def all_live(self) -> list[LiveNode]:
        """The connected nodes of both roles, longest-lived first, with those that are being drained."""
        return [member.node for member in self._connected if member.node is not None]

    def expects(self, role: Role) -> bool:
        """True when the fleet has members of a role, even if none is alive."""
        return any(member.role is role for member in self._members)

    def why_none(self, role: Role) -> str:
        """Why no node of `role` is alive, in one sentence."""
        states = [
            f"{member.name} is {member.state}" + (f" ({member.reason})" if member.reason else "")
            for member in self._members
            if member.role is role
        ]
        states += [f"{node.node_id} is loading ({node.what})" for node in self.loading if node.role is role]
        return f"no {role} node can serve this now: {'; '.join(states) or 'there is none'}"

    async def changed(self) -> None:
        """Wait until a member's state changes."""
        await self._change.wait()

    # --------------------------------------------------------------------------------------- changing
    def report_to(self, dispatcher: Dispatcher, changes: FleetChanges) -> None:
        """Pass nodes' messages about requests to `dispatcher`, others to `changes`. Comes before any `dial`."""
        self._listeners = dispatcher, changes

    def dial(self, address: str, role: Role, *, pinned: bool, node_id: str = "") -> Member | None:
        """Keep a connection to `address` from now on. None when there are too many members, or after `close`."""
        known = next((member for member in self._members if member.address == address), None)
        if known is not None:
            return known
        if self._closed:
            return None
        if len(self._members) >= self._max_members:
            self._member_ignored(address=address, members=len(self._members))
            return None
        member = Member(address, role, pinned, node_id=node_id, since=time.monotonic())
        self._members.append(member)
        self._begin(member)
        return member

    def on_listing(self, listed: Collection[str]) -> None:
        """Take in what discoveries list now: the address of each node. Its role is a guess until its hello."""
        before, self._listed = self._listed, frozenset(listed)
        for member in self._members:
            member.listed = member.listed and member.address in self._listed
        for address in sorted(self._listed - before):
            dialled = self.dial(address, Role.DECODE, pinned=False)
            if dialled is not None:
                dialled.listed = True
            else:  # there is no room: it is new again in the next listing
                self._listed -= {address}

    def redial(self, member: Member) -> None:
        """Dial a member that is not connected at once, without its pause."""
        assert member.node is None and member.task is not None
        member.task.cancel()
        member.exited = ""
        self._set(member, MemberState.DIALLING, "")
        self._begin(member)

    def drain(self, member: Member) -> None:
        """Send a member no new work from now on, and do not dial it again."""
        member.leaving = True
        self.is_new = False
        if member.node is not None:
            self._set(member, MemberState.DRAINING, "removed by the operator")

    def hold(self, member: Member, reason: str) -> None:
        """Send a connected member no new work. It is dialled again when it has left."""
        self._set(member, MemberState.DRAINING, reason)

    def keep(self, member: Member) -> None:
        """Take `drain` or `hold` back: send the member new work, or dial it again."""
        member.leaving = False
        if member.node is None:
            self.redial(member)
        else:
            self._set(member, MemberState.ALIVE, "")

    async def remove(self, member: Member) -> None:
        """Close the connection to a member and forget it."""
        if member in self._members:
            self._forget(member)
        if member.task is not None:
            await asyncio.gather(member.task, return_exceptions=True)

    def ignore_joins_of(self, incarnation: str) -> None:
        """Ignore the announcements of this incarnation of a node."""
        self._removed[incarnation] = None
        self.is_new = False
        if len(self._removed) > _MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    def accept_joins_of(self, incarnation: str) -> None:
        """Take the announcements of this incarnation again, since the operator has added the node."""
        self._removed.pop(incarnation, None)

    def on_announcement(self, message: Announcement) -> None:
        """Take in a node that announces itself (a `join_socket.JoinListener`); `loading` is kept for /health."""
        match message:
            case Loading(node_id) if node_id in self._loading or len(self._loading) < self._max_members:
                self._loading[node_id] = time.monotonic(), message
            case LoadFailed(node_id, _, reason):
                self._loading.pop(node_id, None)
                self._node_failed_to_load(node=node_id, reason=reason)
            case Join(node, role):
                self._loading.pop(node.node_id, None)
                self._join(node, role)
        self._signal()

    def node_exited(self, node_id: str, role: Role, reason: str, *, crashed: bool) -> None:
        """Note that a node's process has ended. The node is lost, and dialled when it announces itself."""
        self._loading.pop(node_id, None)
        members = [m for m in self._members if m.node_id == node_id]
        if not members:
            members = [Member("", role, pinned=False, node_id=node_id)]
            self._members += members
        for member in members:
            member.exited = reason
            if member.node is not None:
                member.node.link.lose(reason, Loss.CRASHED if crashed else Loss.LEFT)
            else:
                if member.task is not None:
                    member.task.cancel()
                self._set(member, MemberState.LOST, reason)

    async def call(
        self,
        message: Callable[[int], RouterToNode],
        timeout_s: float,
        nodes: Sequence[LiveNode] | None = None,
    ) -> dict[str, Answered]:
        """Send a call to `nodes`, or all live ones, and collect the answers by node id.

        A node that does not answer in time, or is lost before, has refused; its answer has the call id 0.
        """
        asked = {
            node.ref.node_id: node.call(message) for node in (self.all_live() if nodes is None else nodes)
        }
        if asked:
            _, late = await asyncio.wait(asked.values(), timeout=timeout_s)
            for answer in late:
                answer.cancel()
        silent = Answered(0, False, f"no answer within {timeout_s:g} s")
        return {name: silent if answer.cancelled() else answer.result() for name, answer in asked.items()}

    async def refresh(self) -> None:
        """Ask every node for its load; one that does not answer in time keeps its last."""
        asked = [asyncio.create_task(node.refresh()) for node in self.all_live()]
        if asked:
            _, late = await asyncio.wait(asked, timeout=self._timing.refresh_s)
            for task in late:
                task.cancel()

    async def close(self) -> None:
        """Say so to every node, close every connection, and dial no node any more."""
        self._closed = True
        for node in self.all_live():
            node.send(Leaving("the router is shutting down"))
        tasks = [member.task for member in self._members if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()
        self._sort()

    # ------------------------------------------------------------------------------------- one member
    def _sort(self) -> None:
        """Take note that a member is connected, is not any more, or has changed its state while it was."""
        connected = [member for member in self._members if member.node is not None]
        self._connected = sorted(connected, key=lambda member: member.since)
        alive = [member for member in self._connected if member.state is MemberState.ALIVE]
        self._live = {role: [m.node for m in alive if m.role is role and m.node is not None] for role in Role}

    def _begin(self, member: Member) -> None:
        member.task = asyncio.create_task(self._keep_dialled(member), name=f"member {member.address}")

    def _join(self, ref: NodeRef, role: Role) -> None:
        """Dial the node. A node repeats its Join, so it is usually dialled already."""
        if ref.incarnation in self._removed:
            return
        for member in self._members:
            restarted = bool(member.exited) or member.address != ref.address
            if member.node_id == ref.node_id and restarted and member.node is None and not member.pinned:
                self._forget(member)
                break
        self.dial(ref.address, role, pinned=False, node_id=ref.node_id)

    async def _keep_dialled(self, member: Member) -> None:
        back_by = 0.0  # in another role
        while True:
            pause_s = self._timing.redial_s
            try:
                await self._one_connection(member)
            except NodeLost as e:
                left = e.loss is Loss.LEFT
                back_by = time.monotonic() + self._timing.hello_s
                self._set(member, MemberState.LEFT if left else MemberState.LOST, str(e))
            except Refusal as e:
                self._set(member, MemberState.REFUSED, str(e))
                pause_s = self._timing.redial_refused_s
            except LinkError as e:
                if member.next_role is None or time.monotonic() > back_by:
                    self._set(member, MemberState.LOST, str(e))
            except Exception:
                crash("member_task", address=member.address)
                self._set(member, MemberState.LOST, "internal error")
            if member.exited:
                self._set(member, MemberState.LOST, member.exited)
                return
            if member.leaving:
                return
            if not (member.pinned or member.listed) and self._is_stale(member):
                self._forget(member)
                return
            await asyncio.sleep(pause_s)

    async def _one_connection(self, member: Member) -> None:
        """Dial, listen, and raise LinkError with the reason of the end."""
        before, member.dialled = member.dialled, await self._resolved(member.address)
        self._raise_if_here(member, knows=member.dialled == before)
        identity = f"router|{self._incarnation}|{next(self._dials)}"
        link = NodeLink(self._context, member.dialled, identity, self._fleet_key)
        try:
            hello = await link.hello(self._incarnation, self._timing.hello_s, resume=member.resume)
            try:
                self._check(member, hello)
            except Refusal as refusal:
                live = [node for node in self.all_live() if node.ref.incarnation == hello.node.incarnation]
                for node in live:  # it answers this connection now, and not that one
                    node.link.lose(f"it was dialled as {member.address} too")
                if not live:
                    # The node has greeted this router, so a change of its role would wait for it.
                    link.send(Leaving(f"the router refuses this node: {refusal}"))
                raise
            assert self._listeners is not None, "report_to comes before the first dial"
            dispatcher, changes = self._listeners
            node = self._admit(member, hello, link)
            dispatcher.on_node_alive(node)
            reason, loss = "closed", Loss.LEFT

            def on_fleet(message: Pong | Draining | Relay) -> None:
                match message:
                    case Pong():
                        self._drain_if_leaking(member, node)
                    case Draining():
                        changes.on_draining(member, message)
                    case Relay():
                        changes.on_relay(message)

            try:
                await node.run(dispatcher, on_fleet)
            except LinkError as e:
                reason, loss = str(e), e.loss if isinstance(e, NodeLost) else Loss.BROKEN
                raise
            finally:
                member.node = None
                self._sort()
                node.lost()
                dispatcher.on_node_lost(node, reason, loss)
                self._announce_peers(node.role, None)
        finally:
            link.close()

    async def _resolved(self, address: str) -> str:
        try:
            async with asyncio.timeout(self._timing.hello_s):
                return (await asyncio.wrap_future(self._resolver.resolve(address)))[0]
        except TimeoutError:
            raise does_not_resolve(address, f"no answer within {self._timing.hello_s:g} s") from None

    def _raise_if_here(self, member: Member, *, knows: bool) -> None:
        """Raise Refusal if the node is connected under another address: a dial would break that connection.

        With `knows`, the node that answered the member's last dial is the one that would answer this.
        """
        for other in self._connected:
            same = knows and other.incarnation == member.incarnation
            if other.dialled == member.dialled or same:
                raise _is_here(other.node_id)

    def _check(self, member: Member, hello: NodeHello) -> None:
        """Raise Refusal, with the name of the field, for a node that does not fit."""
        member.node_id, member.incarnation = hello.node.node_id, hello.node.incarnation
        if hello.role is not member.role and member.resume:
            raise Refusal(f"role: expected a {member.role} node, it is a {hello.role} node")
        member.role = hello.role
        raise_if_impossible(hello)
        live = self.all_live()
        if any(node.ref.node_id == hello.node.node_id for node in live):
            raise _is_here(hello.node.node_id)
        if self._fingerprint not in (None, hello.layout.fingerprint):
            raise Refusal(f"fingerprint: {hello.layout.fingerprint} is not the model that is served here")
        if live:
            raise_if_different(live[0].hello.layout, hello.layout)

    def _admit(self, member: Member, hello: NodeHello, link: NodeLink) -> LiveNode:
        node = LiveNode(hello, link, self._timing)
        self._fingerprint = hello.layout.fingerprint
        member.node = node
        self.is_new = False
        self._loading.pop(node.ref.node_id, None)
        self._set(member, MemberState.ALIVE, "")
        self._announce_peers(hello.role, node)
        return node

    def _drain_if_leaking(self, member: Member, node: LiveNode) -> None:
        if node.load.leak and member.state is MemberState.ALIVE:
            self._set(member, MemberState.DRAINING, f"it leaks KV pages, restart it: {node.load.leak}")

    def _announce_peers(self, changed: Role, joined: LiveNode | None) -> None:
        """Send the decode nodes, to which prefill nodes link, to all prefill nodes, or to the one that joined."""
        connected = self.all_live()
        decode_nodes: tuple[NodeRef, ...] = tuple(node.ref for node in connected if node.role is Role.DECODE)
        prefills = [node for node in connected if node.role is Role.PREFILL]
        for node in prefills if changed is Role.DECODE else [joined] if joined else []:
            node.send(Peers(decode_nodes))

    def _set(self, member: Member, state: MemberState, reason: str) -> None:
        is_new = (state, reason) != (member.state, member.reason)
        if state is MemberState.ALIVE or (state is not member.state and member.state is MemberState.ALIVE):
            member.since = time.monotonic()
        member.state, member.reason = state, reason
        if state in (MemberState.ALIVE, MemberState.LOST, MemberState.REFUSED):
            member.next_role = None
        if member.node is not None:
            self._sort()
        if is_new:
            fields: dict[str, Any] = member.log_fields | ({"reason": reason} if reason else {})
            calm = state in (MemberState.ALIVE, MemberState.DIALLING, MemberState.DRAINING)
            level = logging.INFO if calm else logging.WARNING
            # A list of addresses has no roles: those of its nodes are guessed until their hellos.
            kind = f"{member.role}_node" if member.node_id or not member.listed else "node"
            event(f"{kind}_{state}", level=level, **fields)
        self._signal()

    def _is_stale(self, member: Member) -> bool:
        """The last one of its role stays, so that /health goes on telling what the fleet lacks.

        So does one that has left to come back in another role.
        """
        others = any(other.role is member.role and other is not member for other in self._members)
        is_old = time.monotonic() - member.since > self._timing.forget_s
        has_gone = member.state is MemberState.LEFT and member.next_role is None
        return has_gone or (is_old and others)

    def _forget(self, member: Member) -> None:
        event("node_forgotten", **member.log_fields)
        self._members.remove(member)
        self._sort()
        if member.task is not None and member.task is not asyncio.current_task():
            member.task.cancel()
        self._signal()

    def _signal(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _is_here(node_id: str) -> Refusal:
    return Refusal(f"node_id: {node_id} is already here, under another address")
