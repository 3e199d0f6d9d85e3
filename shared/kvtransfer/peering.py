"""Which receiving nodes a sender is connected to. It dials those that routers name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared import log
from shared.kvtransfer.sender import KVSender
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import NodeRef
from shared.protocol.transfer_messages import LinkOpen, ReceiverToSender
from shared.timeline import Clock

REDIAL_S = 1.0
"""A dial that failed, or a connection that was lost, is followed by another after so long."""
MAX_UNNAMED_PEERS = 16
"""Connections to nodes that no router names, beyond which the one that was used longest ago is closed."""
UNNAMED_IDLE_S = 300.0
"""Such a connection is closed when no transfer has used it for so long."""


@dataclass(eq=False, slots=True)
class _Dialled:
    node: NodeRef
    redial_at: float | None = None
    """None while it is dialled or connected."""
    failure: str = ""
    """Why its last dial failed or its connection was lost; empty once it is connected."""
    used_at: float = 0.0
    has_left: bool = False
    """Whether this node has said that it closes the connection, which it does a moment later."""


class Peering:
    """Keeps connections to receiving nodes, over the control thread. Its methods never block.

    A peer's id is its incarnation, so a restarted node is another peer. A peer that no router names is forgotten when
    its connection is lost, its dial has failed, or no transfer uses it.
    """

    def __init__(self, node: NodeRef, control: ControlThread, sender: KVSender, clock: Clock) -> None:
        self._node = node
        self._control = control
        self._sender = sender
        self._clock = clock
        self._handlers = Handlers(msgspec.msgpack.Decoder(ReceiverToSender), self._on_message)
        self._lock = threading.Lock()
        self._peers: dict[str, _Dialled] = {}
        self._named: dict[str, frozenset[str]] = {}
        """The incarnations that each router names."""

    def set_peers(self, router: str, nodes: Sequence[NodeRef]) -> None:
        """A router names the receiving nodes that it knows, all of them. Each is dialled until it is connected.

        Those that are neither connected nor named any more are forgotten.
        """
        with self._lock:
            self._named[router] = frozenset(node.incarnation for node in nodes)
            if not nodes:
                del self._named[router]
            wanted = self._wanted()
            for peer in [p for p in self._peers.values() if p.redial_at is not None]:
                if peer.node.incarnation not in wanted:
                    del self._peers[peer.node.incarnation]
        for node in nodes:
            self.ensure(node)

    def ensure(self, node: NodeRef) -> None:
        """Dial a node that is not known yet. The unnamed node that was used longest ago is left if there are many."""
        with self._lock:
            known = self._peers.get(node.incarnation)
            if known is not None and not known.has_left:
                known.used_at = self._clock()
                return
            self._leave_unused(num_new=1)
            self._peers[node.incarnation] = _Dialled(node, used_at=self._clock())
        self._dial(node)

    @property
    def unreachable(self) -> dict[str, str]:
        """Nodes whose last dial failed, or whose connection was lost, by incarnation, and why."""
        with self._lock:
            return {incarnation: peer.failure for incarnation, peer in self._peers.items() if peer.failure}

    def redial(self) -> None:
        """Dial the nodes whose pause is over, and close what is not used; a timer calls it."""
        now, due = self._clock(), []
        with self._lock:
            for peer in [peer for peer in self._peers.values() if peer.has_left]:
                del self._peers[peer.node.incarnation]
                self._control.hang_up(peer.node.incarnation)
            self._leave_unused(num_new=0)
            latest = {peer.node.address: peer for peer in self._peers.values()}
            for peer in [p for p in self._peers.values() if p.redial_at is not None and now >= p.redial_at]:
                if latest[peer.node.address] is peer:
                    peer.redial_at = None
                    due.append(peer.node)
                else:  # its process has been started again, and is another peer
                    del self._peers[peer.node.incarnation]
        for node in due:
            self._dial(node)

    def _leave_unused(self, num_new: int) -> None:
        """Tell unnamed nodes that are not used that their connections will close: the message goes out before."""
        now, wanted = self._clock(), self._wanted()
        unnamed = [p for p in self._peers.values() if p.node.incarnation not in wanted and not p.has_left]
        unnamed.sort(key=lambda peer: peer.used_at)
        num_too_many = len(unnamed) + num_new - MAX_UNNAMED_PEERS
        for peer in unnamed:
            if self._sender.is_used_by(peer.node.incarnation):
                peer.used_at = now
            elif num_too_many > 0 or now - peer.used_at >= UNNAMED_IDLE_S:
                self._sender.leave(peer.node.incarnation, "no transfer uses this connection")
                peer.has_left = True
                num_too_many -= 1

    def _wanted(self) -> frozenset[str]:
        return frozenset().union(*self._named.values())

    def _dial(self, node: NodeRef) -> None:
        self._control.dial(
            node.incarnation,
            node.address,
            f"sender|{self._node.incarnation}",
            self._handlers,
            self._on_connected,
            self._on_disconnected,
        )

    def _on_connected(self, incarnation: str) -> None:
        with self._lock:
            if incarnation in self._peers:
                self._peers[incarnation].failure = ""
        self._sender.on_connected(incarnation)

    def _on_message(self, peer: str, message: ReceiverToSender) -> None:
        if isinstance(message, LinkOpen) and message.node.incarnation != peer:
            self._forget_restarted(peer, message.node.incarnation)
            return
        self._sender.on_message(peer, message)

    def _forget_restarted(self, peer: str, now: str) -> None:
        """`peer`, which a router still names, has been started again as `now`, and is not dialled again.

        To the new process this node's two connections have one name, and the later one has taken the place of that to
        `now`, which is made anew.
        """
        log.event("peer_restarted", peer=peer, now=now)
        with self._lock:
            self._peers.pop(peer, None)
            is_known = now in self._peers
        self._control.hang_up(peer)
        self._sender.on_disconnected(peer, f"another node, {now}, answers at its address")
        if is_known:
            self._control.hang_up(now)
            self._on_disconnected(now, f"the connection to {peer} took its place")

    def _on_disconnected(self, incarnation: str, reason: str) -> None:
        with self._lock:
            peer = self._peers.get(incarnation)
            if peer is not None and not peer.has_left and incarnation in self._wanted():
                log.event("peer_disconnected", peer=incarnation, reason=reason, redial_s=REDIAL_S)
                peer.redial_at, peer.failure = self._clock() + REDIAL_S, reason
            else:
                self._peers.pop(incarnation, None)
        self._sender.on_disconnected(incarnation, reason)
