"""The links of one side: at most one per peer that is being built or lives, and the one place where a link dies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared import log
from shared.config import TransferOptions
from shared.kvtransfer.layout import PageStore
from shared.kvtransfer.link import RECEIVER, LinkRate, LinkSpec
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.link_worker import LinkLoop, LinkWorker
from shared.kvtransfer.staging import SlotRing
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import KVLayout, LinkReport, NodeRef
from shared.protocol.outbox import Outbox
from shared.protocol.transfer_messages import LinkLost, LinkOpen, StoreSet
from shared.timeline import Clock

Loop = TypeVar("Loop", bound=LinkLoop)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """This node as one end of its transfers: what a KVSender or a KVReceiver is made of.

    `wake` tells the scheduler that `poll` has something. It is called from any thread, under the lock of the side,
    and must only signal.
    """

    node: NodeRef
    layout: KVLayout
    pages: PageStore
    outbox: Outbox
    transports: Transports
    clock: Clock
    options: TransferOptions
    wake: Callable[[], None]


class Links(Generic[Loop]):
    """All methods are called under `lock`, the lock of the side, except `join`; the properties take it.

    `on_dead(peer_id, reason)` runs under it too, once per link: the side fails there what used the link.
    """

    MAX_NAMES = 1024
    PEER_REPORT_S = 1.0
    """How long a node waits for its peer to report why a link ended that was being built."""

    def __init__(
        self,
        *,
        rank: int,
        lock: threading.RLock,
        own: Endpoint,
        on_dead: Callable[[LinkWorker, str], None],
    ) -> None:
        self._rank = rank
        self._lock = lock
        self._clock = own.clock
        self._options = own.options
        self._outbox = own.outbox
        self._transports = own.transports
        self._on_dead = on_dead
        self._current: dict[str, tuple[LinkWorker, Loop]] = {}
        self._workers: list[LinkWorker] = []
        self._names: deque[str] = deque(maxlen=self.MAX_NAMES)
        self._deaths: dict[str, str] = {}
        """Why the last link of each peer died."""

    @property
    def reports(self) -> tuple[LinkReport, ...]:
        """The live links."""
        with self._lock:
            return tuple(self._report(worker) for worker, _ in self._current.values() if worker.live)

    def broken(self, peers: Container[str]) -> dict[str, str]:
        """Those of `peers` whose last link died, and why, while they have no live one. Forgets other peers."""
        self._deaths = {peer_id: reason for peer_id, reason in self._deaths.items() if peer_id in peers}
        live = {worker.peer_id for worker, _ in self._current.values() if worker.live}
        return {peer_id: reason for peer_id, reason in self._deaths.items() if peer_id not in live}

    def worker(self, peer_id: str) -> LinkWorker | None:
        """The peer's link, building or live."""
        current = self._current.get(peer_id)
        return None if current is None else current[0]

    def loop(self, peer_id: str, name: str | None = None) -> Loop | None:
        """The loop of the peer's link, if there is one (and it is the one called `name`)."""
        current = self._current.get(peer_id)
        if current is None or (name is not None and current[0].name != name):
            return None
        return current[1]

    def known(self, name: str) -> bool:
        """Whether a link of this name was ever begun; a name is not used twice."""
        return name in self._names

    def begin(
        self,
        peer_id: str,
        opening: LinkOpen,
        loop: Loop,
        ring: SlotRing | None = None,
    ) -> None:
        """Build a link as it is being opened, with a peer that has none. `ring` has the slots of a sender."""
        name = opening.link
        assert peer_id not in self._current, "fail the old link first"

        def tell(entry: str, value: bytes) -> None:
            self._outbox.send(peer_id, StoreSet(name, entry, value))

        store = LinkStore(tell, self._options.build_timeout_s)
        worker = LinkWorker(
            spec=LinkSpec(
                name=name,
                rank=self._rank,
                secret=opening.secret,
                store=store,
                slot_nbytes=self._transports.slot_nbytes,
                ring=ring,
            ),
            peer_id=peer_id,
            transport=opening.transport,
            loop=loop,
            factory=self._transports.factories[opening.transport],
            rehearse=self._transports.rehearse,
            passed_over=opening.passed_over,
            clock=self._clock,
            report_dead=self._reported_dead,
            peer_report_s=self.PEER_REPORT_S,
        )
        self._names.append(name)
        self._current[peer_id] = (worker, loop)
        self._workers = [worker for worker in self._workers if not worker.finished]
        self._workers.append(worker)
        worker.start()

    def feed(self, peer_id: str, message: StoreSet) -> None:
        """Take an entry of the peer's half of the rendezvous."""
        worker = self.worker(peer_id)
        if worker is None or worker.name != message.link:
            return
        if not worker.store.feed(message.name, message.value):
            self.fail(worker, "the peer filled the link's store")

    def lost(self, peer_id: str, message: LinkLost) -> None:
        """Handle the peer's message that it has given the link up."""
        worker = self.worker(peer_id)
        if worker is not None and worker.name == message.link:
            self.fail(worker, f"given up by the peer: {message.reason}", tell_peer=False)

    def fail_peer(self, peer_id: str, reason: str, *, tell_peer: bool = True) -> None:
        """End the link with this peer, if there is one."""
        worker = self.worker(peer_id)
        if worker is not None:
            self.fail(worker, reason, tell_peer=tell_peer)

    def fail(self, worker: LinkWorker, reason: str, *, tell_peer: bool = True) -> None:
        """End a link, from any thread. Links die here and nowhere else."""
        if worker.death is not None:
            return
        worker.stop(reason)
        log.event("link_lost", link=worker.name, reason=reason)
        del self._current[worker.peer_id]
        self._deaths[worker.peer_id] = reason
        if tell_peer:
            self._outbox.send(worker.peer_id, LinkLost(worker.name, reason))
        self._on_dead(worker, reason)

    def fail_all(self, reason: str) -> list[LinkWorker]:
        """End every link. Returns the workers that the caller joins, without the lock."""
        for worker, _ in list(self._current.values()):
            self.fail(worker, reason)
        return [worker for worker in self._workers if not worker.finished]

    def join(self, workers: list[LinkWorker]) -> None:
        """Wait until the workers of dead links are gone. Not under the lock: they need it to report."""
        for worker in workers:
            worker.abort_ops()
        for worker in workers:
            worker.join(self._options.build_timeout_s + self._options.op_timeout_s)

    def _report(self, worker: LinkWorker) -> LinkReport:
        rate = worker.rate or LinkRate(gb_s=0.0, latency_ms=0.0)
        return LinkReport(
            worker.peer_id,
            self._rank == RECEIVER,
            worker.transport,
            round(rate.gb_s, 4),
            round(rate.latency_ms, 3),
            worker.passed_over,
            round(worker.pace.slow_gb_s, 4) if worker.pace else 0.0,
        )

    def _reported_dead(self, worker: LinkWorker, reason: str) -> None:
        with self._lock:
            self.fail(worker, reason)
