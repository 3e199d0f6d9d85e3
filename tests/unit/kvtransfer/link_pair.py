"""Nodes with real links, in this process."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvcache.page_mover import PageMover
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint, PageStore
from shared.kvtransfer.link import RECEIVER, SENDER, Link, LinkFactory, LinkSpec
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.sides import make_sides
from shared.kvtransfer.staging import SlotRing
from shared.kvtransfer.states import Received, ReceiveFailed, SendEnded
from shared.kvtransfer.transports.choice import Transports, host_identity, make_transports
from shared.kvtransfer.transports.common import ThreadRunner
from shared.kvtransfer.transports.cuda.cuda_ipc import CudaIpcLinkFactory
from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory
from shared.protocol.channel import ControlThread
from shared.protocol.messages import KVLayout, NodeRef, ReqKey, Struct
from shared.protocol.transfer_messages import Handoff, Place, Ready
from shared.timeline import Clock
from tests.fake_cuda import FakeRuntime
from tests.fake_nccl import FakeNccl
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.looks import num_live

CPU = torch.device("cpu")
ON_A_CPU = DeviceThreads()
LAYOUT = KVLayout("f00d", "float32", 16, 4, 2, 32)
BACKENDS = ("gloo", "shm", "cuda-ipc", "tcp", "tls")
"""cuda-ipc runs over a fake of the CUDA runtime, and tls is tcp with TLS."""
NCCL = FakeNccl()
BACKENDS_IN_ONE_PROCESS = (*BACKENDS, "nccl")
"""nccl runs over a fake whose groups find each other in memory."""
REAL = TransferOptions(
    slot_nbytes=256 << 10,
    ping_s=0.2,
    peer_timeout_s=PATIENCE_S,
    lease_s=PATIENCE_S,
    rebuild_min_s=0.05,
    rebuild_max_s=0.5,
    op_timeout_s=PATIENCE_S,
    build_timeout_s=PATIENCE_S,
)
"""No timeout of a link is over before a test has given up: what ends a link is noticed by other means."""


def real(backend: str) -> TransferOptions:
    if backend == "tls":
        return dataclasses.replace(REAL, backend="tcp", kv_tls=True)
    return dataclasses.replace(REAL, backend=backend)


def transports(options: TransferOptions, threads: DeviceThreads = ON_A_CPU) -> Transports:
    if options.backend == "cuda-ipc":
        return over_fake_cuda(options, FakeRuntime(), threads)
    if options.backend == "nccl":
        return over_fake_nccl(options, NCCL, threads)
    return make_transports(options, CPU, threads=threads)


def over_fake_nccl(options: TransferOptions, nccl: FakeNccl, threads: DeviceThreads = ON_A_CPU) -> Transports:
    """Each node is on a GPU of its own."""
    assert options.slot_nbytes is not None
    factory = NcclLinkFactory(options, CPU, nccl.new_group, threads)
    place = Place(gpu=secrets.token_hex(4))
    return Transports({"nccl": factory}, ThreadRunner(threads), place, options.slot_nbytes)


def over_fake_cuda(
    options: TransferOptions, runtime: FakeRuntime, threads: DeviceThreads = ON_A_CPU
) -> Transports:
    assert options.slot_nbytes is not None
    factory = CudaIpcLinkFactory(options, runtime, threads)
    place = Place(host_identity(), "GPU-0")
    return Transports({"cuda-ipc": factory}, ThreadRunner(threads), place, options.slot_nbytes)


def new_pool(num_pages: int, mover: PageMover | None = None) -> TokenToKVPool:
    return TokenToKVPool(
        num_pages=num_pages,
        page_size=LAYOUT.page_size,
        num_layers=LAYOUT.num_layers,
        num_kv_heads=LAYOUT.num_kv_heads,
        head_dim=LAYOUT.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mover=mover,
    )


def key(number: int) -> ReqKey:
    return ReqKey("router", str(number), 0)


def handoff(of: ReqKey, total_pages: int) -> Handoff:
    return Handoff(of, total_pages, (5,), total_pages * LAYOUT.page_size, 9, 0, ())


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("baton-kv-slot")


def link_spec(rank: int, store: LinkStore, factory: LinkFactory, num_slots: int = 4) -> LinkSpec:
    """A link that a test builds by itself, with slots of 4096 bytes."""
    ring = SlotRing(num_slots, 4096, factory.new_slot)
    return LinkSpec(name="l", rank=rank, secret=b"s", store=store, ring=ring)


class Ends:
    """Both ends of one link, and their stores, whose entries pass unless the test holds headers back."""

    def __init__(self, factory: LinkFactory, num_slots: int = 4) -> None:
        self.factory = factory
        self.headers: list[tuple[str, bytes]] = []
        self.holds_headers = False
        self.links: dict[int, Link] = {}
        self.failures: dict[int, str] = {}
        self.died = {rank: threading.Event() for rank in (RECEIVER, SENDER)}
        self.stores = {rank: LinkStore(partial(self._pass, 1 - rank), PATIENCE_S) for rank in self.died}
        threads = [threading.Thread(target=self._build, args=(rank, num_slots)) for rank in self.died]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def sender(self) -> Link:
        return self.links[SENDER]

    @property
    def receiver(self) -> Link:
        return self.links[RECEIVER]

    def _pass(self, to: int, name: str, value: bytes) -> None:
        if self.holds_headers and name.startswith("header/"):
            self.headers.append((name, value))
        else:
            self.stores[to].feed(name, value)

    def _build(self, rank: int, num_slots: int) -> None:
        spec = link_spec(rank, self.stores[rank], self.factory, num_slots)
        try:
            link = self.factory.build(spec, lambda reason: self.died[rank].set(), block=True)
        except LinkError as error:
            self.failures[rank] = str(error)
            return
        assert link is not None
        self.links[rank] = link

    def close(self) -> None:
        for link in self.links.values():
            link.close()


class RealNode:
    """Both sides of one node with real links, over real control sockets. `step` is a round of its scheduler."""

    def __init__(
        self,
        name: str,
        options: TransferOptions,
        *,
        offers: Transports | None = None,
        num_pages: int = 64,
        mover: PageMover | None = None,
        wrap: Callable[[PageStore], PageStore] = lambda pages: pages,
        clock: Clock = time.monotonic,
        woken: threading.Event | None = None,
        listens: bool = True,
    ) -> None:
        self.control = ControlThread()
        self.port = self.control.bind("127.0.0.1", 0) if listens else 0
        self.control.start()
        self.ref = NodeRef(name, name, f"tcp://127.0.0.1:{self.port}")
        self.pool = new_pool(num_pages, mover)
        self.pages = wrap(self.pool)
        self.sides = make_sides(
            Endpoint(
                node=self.ref,
                layout=LAYOUT,
                pages=self.pages,
                outbox=self.control.to_dialled,
                transports=offers or transports(options),
                clock=clock,
                options=options,
                wake=(woken or threading.Event()).set,
            ),
            self.control,
        )
        self.sender, self.receiver = self.sides.sender, self.sides.receiver
        if listens:
            self.control.admit(self.sides.handlers())
        self.to_send: dict[ReqKey, list[int]] = {}
        """Pages that are offered when there is a place for them."""
        self.ready: dict[ReqKey, int] = {}
        self.sent: dict[ReqKey, SendEnded] = {}
        self.received: dict[ReqKey, Received | ReceiveFailed] = {}

    def step(self) -> None:
        self.sender.tick()
        self.receiver.tick()
        for event in self.sender.poll():
            match event:
                case Ready():
                    self.ready[event.key] = event.prefix_pages
                    if event.key in self.to_send:
                        self.offer(event.key, self.to_send[event.key])
                case SendEnded():
                    self.sent[event.key] = event
        for ended in self.receiver.poll():
            self.received[ended.key] = ended

    def offer(self, of: ReqKey, pages: list[int]) -> None:
        """Offer everything, and hand off."""
        self.sender.offer(of, pages)
        self.sender.handoff(of, handoff(of, len(pages)))

    def until(self, condition: Callable[[], bool], *others: RealNode) -> None:
        """Step this node, and others, until the condition holds."""

        def stepped() -> bool:
            for node in (self, *others):
                node.step()
            return condition()

        until(stepped)

    def close(self) -> None:
        self.sides.close()
        self.control.close()


class LinkPair:
    """A sending node and a receiving node in this process. `tamper` changes what the receiving node says."""

    def __init__(
        self,
        options: TransferOptions,
        *,
        p_transports: Transports | None = None,
        d_transports: Transports | None = None,
        num_pages: int = 64,
        tamper: Callable[[Struct], Struct] = lambda message: message,
        mover: PageMover | None = None,
    ) -> None:
        self.woken = threading.Event()
        new_node = partial(RealNode, options=options, num_pages=num_pages, mover=mover, woken=self.woken)
        self.sending = new_node("p0", offers=p_transports, listens=False)
        self.receiving = new_node("d0", offers=d_transports)
        self.p, self.d = self.sending.sender, self.receiving.receiver
        self.p_pool, self.d_pool = self.sending.pool, self.receiving.pool
        self.p_pool.buffer_LSNHPD.normal_()
        self.ready, self.sent = self.sending.ready, self.sending.sent
        self.received = self.receiving.received
        on_message = self.p.on_message
        self.p.on_message = lambda peer, message: on_message(peer, tamper(message))  # type: ignore[assignment,method-assign,arg-type]
        self.sending.sides.peering.ensure(self.receiving.ref)

    def step(self) -> None:
        self.sending.step()
        self.receiving.step()

    def until(self, condition: Callable[[], bool]) -> None:
        self.sending.until(condition, self.receiving)

    def until_received(self, number: int) -> None:
        self.until(lambda: key(number) in self.received)

    def until_opened(self, num_links: int) -> None:
        self.until(lambda: self.d.num_links_opened >= num_links)

    def linked(self) -> bool:
        return num_live(self.p) == num_live(self.d) == 1

    def transfer(self, number: int, p_pages: list[int], d_pages: list[int]) -> None:
        """Open, offer everything and hand off; `received` and `sent` tell how it ended."""
        new = key(number)
        self.d.open(new, "p0", d_pages, 0)
        self.p.open(new, "d0")
        self.until(lambda: new in self.ready)
        self.sending.offer(new, p_pages)

    def moves_pages(self, number: int = 0) -> None:
        """Some pages arrive."""
        p_pages, d_pages = list(range(1, 30)), list(range(30, 59))
        self.transfer(number, p_pages, d_pages)
        self.until_received(number)
        assert isinstance(self.received[key(number)], Received), self.received[key(number)]
        assert torch.equal(self.d_pool.buffer_LSNHPD[:, :, d_pages], self.p_pool.buffer_LSNHPD[:, :, p_pages])

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()
