"""The peers of one side: nodes whose control connection is up, and that may fall silent or refuse this node."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared import log
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.links import Endpoint, Links, Loop
from shared.protocol.heartbeat import Heartbeat
from shared.protocol.transfer_messages import LinkLost, PeerPing, PeerPong, StoreSet

PeerMessage = StoreSet | LinkLost | PeerPing | PeerPong
State = TypeVar("State")


@dataclass(slots=True)
class Peer(Generic[State]):
    """One peer. `state` is what only a sender, or only a receiver, knows of it."""

    peer_id: str
    heartbeat: Heartbeat
    state: State
    refused: str | None = None
    """Why the two nodes can exchange no pages."""
    silent: bool = False


class PeerTable(ABC, Generic[State, Loop]):
    """The peers of one side by their ids, and the links to them: what `SenderPeers` and `ReceiverPeers` share.

    Used under the lock of the side, which `unreachable` and the properties of `links` take.
    """

    def __init__(self, own: Endpoint, lock: threading.RLock, *, rank: int) -> None:
        self._own = own
        self._outbox = own.outbox
        self._options = own.options
        self._lock = lock
        self._peers: dict[str, Peer[State]] = {}
        self._ping_seq = 0
        self.links: Links[Loop] = Links(rank=rank, lock=lock, own=own, on_dead=self._link_died)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._peers

    @abstractmethod
    def _link_died(self, worker: LinkWorker, reason: str) -> None:
        """A link is dead, and what used it fails."""

    @property
    def ids(self) -> list[str]:
        """Of all peers."""
        return list(self._peers)

    def _add(self, peer_id: str, state: State, now: float) -> Peer[State]:
        """A peer that is heard now; it takes the place of one of the same id."""
        heartbeat = Heartbeat(self._options.ping_s, self._options.peer_timeout_s, now)
        peer = self._peers[peer_id] = Peer(peer_id, heartbeat, state)
        return peer

    def refusal(self, peer_id: str) -> str | None:
        """Why this node and the peer can exchange no pages, if they cannot."""
        peer = self._peers.get(peer_id)
        return None if peer is None else peer.refused

    def heard(self, peer_id: str, now: float) -> bool:
        """Note that a message of the peer has come; False when it is not in the table."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.heartbeat.heard(now)
            peer.silent = False
        return peer is not None

    def clear(self) -> None:
        """Forget all peers, whose links have ended."""
        self._peers.clear()

    def _watch(self, now: float) -> Iterator[tuple[Peer[State], str | None]]:
        """Ping each peer that is due, and end the link of each that is silent.

        Yields every peer, with the reason why its transfers fail if it has just been found silent (again).
        """
        for peer in list(self._peers.values()):
            reason = None
            if peer.heartbeat.silent(now):
                if not peer.silent:
                    log.warn("peer_silent", peer=peer.peer_id)
                peer.silent = True
                reason = f"silent for {self._options.peer_timeout_s:g} s"
                self.links.fail_peer(peer.peer_id, reason)
            if peer.heartbeat.ping_due(now):
                self._ping_seq += 1
                self._outbox.send(peer.peer_id, PeerPing(self._ping_seq))
            yield peer, reason

    def _take(self, peer: Peer[State], message: PeerMessage) -> None:
        """A message about the peer or its link, of the kinds that both ends send."""
        match message:
            case StoreSet():
                self.links.feed(peer.peer_id, message)
            case LinkLost():
                self.links.lost(peer.peer_id, message)
            case PeerPing():
                self._outbox.send(peer.peer_id, PeerPong(message.seq))
            case PeerPong():
                pass

    @property
    def unreachable(self) -> dict[str, str]:
        """Peers to which pages cannot travel now, and why; a link that is being built is none of them."""
        with self._lock:
            refused = {peer.peer_id: peer.refused for peer in self._peers.values() if peer.refused}
            return self.links.broken(self._peers) | refused
