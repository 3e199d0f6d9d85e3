"""The sending nodes that a KVReceiver has met, and the links from them.

A sending node introduces itself (PeerHello). The receiving node answers with Refused, or opens a link: it decides
when a link is built, over which transport, and when the next one follows one that died.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared import log
from shared.errors import ConfigError, PeerMismatch
from shared.kvtransfer.layout import ChunkPlan, check_layout
from shared.kvtransfer.link import RECEIVER
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.links import Endpoint
from shared.kvtransfer.peers import Peer, PeerMessage, PeerTable
from shared.kvtransfer.receive_loop import ReceiveLoop, ScatterGate
from shared.kvtransfer.transports.choice import better_than
from shared.protocol.messages import Refused, other_version
from shared.protocol.transfer_messages import Grant, LinkOpen, PeerHello, PeerLeft


@dataclass(slots=True)
class _NextLink:
    plan: ChunkPlan
    """How pages from this peer are cut, so that they fit the slots of both ends."""
    transports: deque[str] = field(default_factory=deque)
    """What both ends can use; the first is what the next link will use."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """What is not used, and why."""
    num_failures: int = 0
    """Links lost in a row, none of which lasted."""
    rebuild_at: float = 0.0


class ReceiverPeers(PeerTable[_NextLink, ReceiveLoop]):
    """The peers of a KVReceiver.

    `link_begins(peer_id)` and `refused(peer_id)` are called when a peer's link is being built, or never will be;
    `link_died(peer_id, reason)`, when it is dead.
    """

    def __init__(
        self,
        own: Endpoint,
        lock: threading.RLock,
        *,
        gate: ScatterGate,
        link_begins: Callable[[str], None],
        link_died: Callable[[str, str], None],
        refused: Callable[[str], None],
    ) -> None:
        super().__init__(own, lock, rank=RECEIVER)
        self._gate = gate
        self._link_begins = link_begins
        self._tell_link_died = link_died
        self._tell_refused = refused
        self.num_links_opened = 0
        """Links ever begun; more than peers when some had to be rebuilt."""
        self._own_plan = self._plan(own.transports.slot_nbytes)

    def plan(self, peer_id: str) -> ChunkPlan:
        """How pages from a peer, which this node has met, are cut into chunks."""
        peer = self._peers.get(peer_id)
        return self._own_plan if peer is None else peer.state.plan

    def handle(self, peer_id: str, message: PeerHello | PeerLeft | PeerMessage, now: float) -> None:
        """Handle a message that names no transfer. A node that has not introduced itself gets no answer."""
        peer = self._peers.get(peer_id)
        if isinstance(message, PeerHello):
            self._met(peer_id, message, now)
        elif isinstance(message, PeerLeft):
            self._peers.pop(peer_id, None)
            self.links.fail_peer(peer_id, "the sending node has left", tell_peer=False)
        elif peer is not None:
            self._take(peer, message)

    def tick(self, now: float) -> None:
        """Ping peers, end links of silent ones, open the link of each peer that may have one and has none."""
        for peer, silence in self._watch(now):
            if silence is not None and peer.heartbeat.silence(now) >= self._options.forget_peer_s:
                # ZeroMQ does not tell the listening end of a connection that it broke.
                del self._peers[peer.peer_id]
                continue
            unlinked = self.links.worker(peer.peer_id) is None and peer.refused is None and not peer.silent
            if unlinked and now >= peer.state.rebuild_at:
                self._open_link(peer)

    def _plan(self, slot_nbytes: int) -> ChunkPlan:
        own = self._own
        return ChunkPlan.fit(
            num_layers=own.layout.num_layers,
            unit_nbytes=own.pages.gather_nbytes(1, 1),
            slot_nbytes=slot_nbytes,
        )

    def _met(self, peer_id: str, hello: PeerHello, now: float) -> None:
        self.links.fail_peer(peer_id, "the peer connected anew", tell_peer=False)
        peer = self._add(peer_id, _NextLink(self._own_plan), now)
        try:
            if why := other_version("sending node", hello.version):
                raise PeerMismatch(why)
            check_layout(
                self._own.layout, hello.layout, allow_mixed_numerics=self._options.allow_mixed_numerics
            )
            usable, passed_over = self._own.transports.in_common(hello.transports, hello.place)
            peer.state.transports.extend(usable)
            peer.state.passed_over |= passed_over
            peer.state.plan = self._plan(min(hello.slot_nbytes, self._own.transports.slot_nbytes))
        except (PeerMismatch, ConfigError) as error:
            peer.refused = str(error)
            log.warn("peer_refused", peer=peer_id, reason=peer.refused)
            self._outbox.send(peer_id, Refused(peer.refused))
            self._tell_refused(peer_id)
            return
        self._open_link(peer)

    def _open_link(self, peer: Peer[_NextLink]) -> None:
        self.num_links_opened += 1
        name = f"{peer.peer_id}>{self._own.node.node_id}/{self._own.node.incarnation}#{self.num_links_opened}"
        transport = peer.state.transports[0]
        passed_over = better_than(transport, peer.state.passed_over)
        opening = LinkOpen(name, self._own.node, secrets.token_bytes(32), transport, passed_over)

        def send_grant(grant: Grant) -> None:
            self._outbox.send(peer.peer_id, grant)

        loop = ReceiveLoop(name=name, pages=self._own.pages, gate=self._gate, send_grant=send_grant)
        # LinkOpen goes out before anything that the worker may send about the link.
        self._outbox.send(peer.peer_id, opening)
        self.links.begin(peer.peer_id, opening, loop)
        self._link_begins(peer.peer_id)

    def _link_died(self, worker: LinkWorker, reason: str) -> None:
        peer, now = self._peers.get(worker.peer_id), self._own.clock()
        if peer is not None:
            options, state = self._options, peer.state
            lasted = worker.live_at is not None and now - worker.live_at >= options.rebuild_max_s
            state.num_failures = 1 if lasted else state.num_failures + 1
            pause = options.rebuild_min_s * 2 ** min(state.num_failures - 1, 30)
            state.rebuild_at = now + min(pause, options.rebuild_max_s)
            # It could not be built, and not because the peer was gone: the next transport is tried.
            if worker.live_at is None and not peer.heartbeat.silent(now) and len(state.transports) > 1:
                state.passed_over[worker.transport] = reason
                state.transports.rotate(-1)
                log.warn("transport_fallback", link=worker.name, to=state.transports[0], reason=reason)
        self._tell_link_died(worker.peer_id, reason)
