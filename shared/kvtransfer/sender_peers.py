"""The receiving nodes that a KVSender is connected to, and the links to them.

The sending node introduces itself (PeerHello); the receiving node answers with LinkOpen, upon which both build the
link, or with Refused.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from shared import log
from shared.errors import LinkError
from shared.kvtransfer.link import SENDER
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.links import Endpoint
from shared.kvtransfer.peers import Peer, PeerMessage, PeerTable
from shared.kvtransfer.send_loop import GatherGate, SendLoop
from shared.kvtransfer.staging import SlotRing
from shared.protocol.messages import PROTOCOL_VERSION, Refused
from shared.protocol.transfer_messages import Grant, LinkLost, LinkOpen, PeerHello


class FailTransfers(Protocol):
    """Fails transfers to a peer that is lost."""

    def __call__(self, peer_id: str, reason: str, *, waiting_too: bool, tell_peer: bool) -> None:
        """Fail those that use the link; with `waiting_too`, those that wait for their Ready as well."""
        ...


@dataclass(slots=True)
class _Hello:
    at: float
    """When this node last introduced itself to the peer, or lost the link."""


class SenderPeers(PeerTable[_Hello, SendLoop]):
    """The peers of a KVSender."""

    def __init__(
        self,
        own: Endpoint,
        lock: threading.RLock,
        *,
        gate: GatherGate,
        fail_transfers: FailTransfers,
    ) -> None:
        super().__init__(own, lock, rank=SENDER)
        self._gate = gate
        self._fail_transfers = fail_transfers

    def connected(self, peer_id: str) -> None:
        """Enter a node whose connection is up, and introduce this node to it."""
        now = self._own.clock()
        self._add(peer_id, _Hello(now), now)
        self._say_hello(peer_id)

    def disconnected(self, peer_id: str, reason: str) -> bool:
        """Forget a node whose connection is gone, and fail its transfers; False when there was none."""
        if self._peers.pop(peer_id, None) is None:
            return False
        self.links.fail_peer(peer_id, reason, tell_peer=False)
        self._fail_transfers(peer_id, reason, waiting_too=True, tell_peer=False)
        return True

    def handle(self, peer_id: str, message: Grant | LinkOpen | Refused | PeerMessage) -> None:
        """Handle a message of a peer that names no transfer."""
        peer = self._peers[peer_id]
        match message:
            case Grant():
                self._granted(peer_id, message)
            case LinkOpen():
                self._open_link(peer, message)
            case Refused():
                log.warn("peer_refused_us", peer=peer_id, reason=message.reason)
                peer.refused = message.reason
                self.links.fail_peer(peer_id, message.reason, tell_peer=False)
                self._fail_transfers(peer_id, message.reason, waiting_too=True, tell_peer=False)
            case _:
                self._take(peer, message)

    def tick(self, now: float) -> None:
        """Ping peers, fail what silent ones have, and introduce this node anew where it has had no link for long."""
        for peer, silence in self._watch(now):
            if silence is not None:
                self._fail_transfers(peer.peer_id, silence, waiting_too=True, tell_peer=True)
            # A silent peer gets one too: it may have forgotten this node, and answers no pings of unknown nodes.
            unlinked = self.links.worker(peer.peer_id) is None and peer.refused is None
            if unlinked and now - peer.state.at >= self._options.hello_retry_s:
                peer.state.at = now
                self._say_hello(peer.peer_id)

    def _say_hello(self, peer_id: str) -> None:
        own, transports = self._own, self._own.transports
        offered = tuple(transports.factories)
        place, slot_nbytes = transports.place, transports.slot_nbytes
        hello = PeerHello(own.node, own.layout, offered, place, slot_nbytes, PROTOCOL_VERSION)
        self._outbox.send(peer_id, hello)

    def _granted(self, peer_id: str, grant: Grant) -> None:
        loop = self.links.loop(peer_id, grant.link)
        if loop is None:
            self._outbox.send(peer_id, LinkLost(grant.link, "there is no such link here"))
            return
        try:
            loop.accept(grant)
        except LinkError as error:
            self.links.fail_peer(peer_id, str(error))

    def _open_link(self, peer: Peer[_Hello], message: LinkOpen) -> None:
        if self.links.known(message.link):
            return
        factory = self._own.transports.factories.get(message.transport)
        if factory is None:
            reason = f"kv_transfer: {message.transport} was not offered"
            self._outbox.send(peer.peer_id, LinkLost(message.link, reason))
            return
        self.links.fail_peer(peer.peer_id, "replaced by another incarnation")
        # A Ready that came before this LinkOpen was for the old link.
        self._fail_transfers(peer.peer_id, "the link was replaced", waiting_too=False, tell_peer=True)
        peer.refused = None
        peer.state.at = self._own.clock()
        ring = SlotRing(self._options.num_slots, self._own.transports.slot_nbytes, factory.new_slot)
        loop = SendLoop(
            ring=ring,
            pages=self._own.pages,
            num_layers=self._own.layout.num_layers,
            gate=self._gate,
            copier=factory.new_copier(message.link),
        )
        self.links.begin(peer.peer_id, message, loop, ring)

    def _link_died(self, worker: LinkWorker, reason: str) -> None:
        peer = self._peers.get(worker.peer_id)
        if peer is not None:
            peer.state.at = self._own.clock()
        self._fail_transfers(worker.peer_id, f"link lost: {reason}", waiting_too=False, tell_peer=True)
