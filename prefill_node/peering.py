"""Which decode nodes this prefill node is connected to. It dials those that routers name."""

from __future__ import annotations

import threading
from typing import Protocol

import msgspec

from shared import log
from shared.kvtransfer.sender import SendSide
from shared.protocol.channel import ControlThread, Guests
from shared.protocol.messages import DecodeToPrefill, LinkOpen, NodeRef


class Peering(Protocol):
    """Keeps connections to decode nodes."""

    def ensure(self, node: NodeRef) -> None:
        """Dial `node` unless connected; must not block. A node that went away is dialled anew."""
        ...


class DialledPeering:
    """Over the control thread. A peer's id is its incarnation, so a restarted node is another peer."""

    def __init__(self, node: NodeRef, control: ControlThread, sender: SendSide) -> None:
        self._node = node
        self._control = control
        self._sender = sender
        self._guests = Guests(msgspec.msgpack.Decoder(DecodeToPrefill), self._on_message)
        self._lock = threading.Lock()
        self._dialled: set[str] = set()

    def ensure(self, node: NodeRef) -> None:
        """See Peering."""
        with self._lock:
            if node.incarnation in self._dialled:
                return
            self._dialled.add(node.incarnation)
        self._control.dial(
            node.incarnation,
            node.address,
            f"prefill|{self._node.incarnation}",
            self._guests,
            self._sender.on_connected,
            self._on_disconnected,
        )

    def _on_message(self, peer: str, message: DecodeToPrefill) -> None:
        if isinstance(message, LinkOpen) and message.node.incarnation != peer:
            log.warn("peer_restarted", peer=peer, now=message.node.incarnation)
            self._control.hang_up(peer)
            self._on_disconnected(peer, f"another node, {message.node.incarnation}, answers at its address")
            return
        self._sender.on_message(peer, message)

    def _on_disconnected(self, peer: str, reason: str) -> None:
        with self._lock:
            self._dialled.discard(peer)
        self._sender.on_disconnected(peer, reason)
