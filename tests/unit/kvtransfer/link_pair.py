"""Two sides over real links, their control channel a queue and a thread each, or a pipe between processes."""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvcache.page_mover import PageMover
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.layout import PageStore
from shared.kvtransfer.link import RECEIVER, SENDER, Link, LinkFactory, LinkSpec
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.staging import SlotRing
from shared.kvtransfer.states import Received, ReceiveFailed, SendEnded
from shared.kvtransfer.transports.choice import Transports, host_identity, make_transports
from shared.kvtransfer.transports.common import ThreadRunner
from shared.kvtransfer.transports.cuda.cuda_ipc import CudaIpcLinkFactory
from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory
from shared.kvtransfer.transports.rehearsal import Rehearsal
from shared.protocol.messages import KVLayout, NodeRef, ReqKey, Struct
from shared.protocol.transfer_messages import Handoff, Place, Ready, ReceiverToSender, SenderToReceiver
from tests.fake_cuda import FakeRuntime
from tests.fake_nccl import FakeNccl
from tests.page_stores import PagesAround
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
    return Transports(
        {"nccl": factory}, ThreadRunner(threads), place, options.slot_nbytes, rehearse=Rehearsal(CPU)
    )


def over_fake_cuda(
    options: TransferOptions, runtime: FakeRuntime, threads: DeviceThreads = ON_A_CPU
) -> Transports:
    assert options.slot_nbytes is not None
    factory = CudaIpcLinkFactory(options, runtime, threads)
    place = Place(host_identity(), "GPU-0")
    return Transports(
        {"cuda-ipc": factory}, ThreadRunner(threads), place, options.slot_nbytes, rehearse=Rehearsal(CPU)
    )


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


class Mailbox:
    """The control thread of one side: delivers what the other side sends."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.on_message: Callable[[str, Any], None] = lambda peer, message: None
        self._queue: queue.SimpleQueue[Struct | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, message: Struct) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self.on_message(self.peer, message)


class ToMailbox:
    """An Outbox with one possible receiver."""

    def __init__(
        self, mailbox: Mailbox, tamper: Callable[[Struct], Struct] = lambda message: message
    ) -> None:
        self._mailbox = mailbox
        self._tamper = tamper

    def send(self, to: str, message: Struct) -> None:
        self._mailbox.put(self._tamper(message))


class LinkPair:
    """One prefill and one decode side in this process. `step` is both schedulers' round."""

    def __init__(
        self,
        options: TransferOptions,
        *,
        p_transports: Transports | None = None,
        d_transports: Transports | None = None,
        num_pages: int = 64,
        tamper: Callable[[Struct], Struct] = lambda message: message,
        mover: PageMover | None = None,
        wrap: Callable[[PageStore], PageStore] = lambda pages: pages,
    ) -> None:
        self.at_p, self.at_d = Mailbox("d0"), Mailbox("p0")
        self.p_pool, self.d_pool = new_pool(num_pages, mover), new_pool(num_pages, mover)
        self.p_pool.buffer_LSNHPD.normal_()
        self.ready: dict[ReqKey, int] = {}
        self.sent: dict[ReqKey, SendEnded] = {}
        self.received: dict[ReqKey, Received | ReceiveFailed] = {}
        self.woken = threading.Event()
        self.p = KVSender(
            Endpoint(
                node=NodeRef("p0", "i", ""),
                layout=LAYOUT,
                pages=wrap(self.p_pool),
                outbox=ToMailbox(self.at_d),
                transports=p_transports or transports(options),
                clock=time.monotonic,
                options=options,
                wake=self.woken.set,
            )
        )
        self.d = KVReceiver(
            Endpoint(
                node=NodeRef("d0", "i", ""),
                layout=LAYOUT,
                pages=wrap(self.d_pool),
                outbox=ToMailbox(self.at_p, tamper),
                transports=d_transports or transports(options),
                clock=time.monotonic,
                options=options,
                wake=self.woken.set,
            )
        )
        self.at_p.on_message, self.at_d.on_message = self.p.on_message, self.d.on_message
        self.p.on_connected("d0")

    def step(self) -> None:
        self.p.tick()
        self.d.tick()
        for event in self.p.poll():
            match event:
                case Ready():
                    self.ready[event.key] = event.prefix_pages
                case SendEnded():
                    self.sent[event.key] = event
        for ended in self.d.poll():
            self.received[ended.key] = ended

    def until(self, condition: Callable[[], bool]) -> None:
        def stepped() -> bool:
            self.step()
            return condition()

        until(stepped)

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
        self.p.offer(new, p_pages)
        self.p.handoff(new, handoff(new, len(p_pages)))

    def close(self) -> None:
        self.p.close()
        self.d.close()
        self.at_p.close()
        self.at_d.close()


class PipeOutbox:
    """Control messages over a pipe. A write to a dead peer is lost, as on a socket."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, to: str, message: Struct) -> None:
        self._queue.put(msgspec.msgpack.encode(message))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:
                return


def pump(
    pipe: Connection, decoder: Any, on_message: Callable[[Any], None], on_eof: Callable[[], None]
) -> None:
    """The reading half of a control thread."""

    def run() -> None:
        try:
            while True:
                on_message(decoder.decode(pipe.recv_bytes()))
        except (EOFError, OSError):
            on_eof()

    threading.Thread(target=run, daemon=True).start()


class SlowPages(PagesAround):
    """A pool that takes a millisecond longer to gather, so that a transfer has a middle."""

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        time.sleep(0.001)
        return super().gather(page_ids, first_layer, num_layers, out, seed)


def prefill_process(pipe: Connection, num_pages: int, options: TransferOptions) -> None:
    """A prefill node that offers all its pages for every key that the decode node opens, until it is killed.

    There is no router here: a Ready of an unknown key stands for the router's Prefill message.
    """
    torch.set_num_threads(1)
    pool = new_pool(num_pages)
    pool.buffer_LSNHPD.copy_(pattern(num_pages))
    side = KVSender(
        Endpoint(
            node=NodeRef("p0", str(os.getpid()), ""),
            layout=LAYOUT,
            pages=SlowPages(pool),
            outbox=PipeOutbox(pipe),
            transports=transports(options),
            clock=time.monotonic,
            options=options,
            wake=lambda: None,
        )
    )
    asked: queue.SimpleQueue[ReqKey] = queue.SimpleQueue()

    def on_message(message: Any) -> None:
        if isinstance(message, Ready):
            asked.put(message.key)
        side.on_message("d0", message)

    pump(pipe, msgspec.msgpack.Decoder(ReceiverToSender), on_message, lambda: os._exit(0))
    side.on_connected("d0")
    while True:
        while not asked.empty():
            side.open(asked.get(), "d0")
        for event in side.poll():
            if isinstance(event, Ready):
                side.offer(event.key, list(range(1, num_pages)))
                side.handoff(event.key, handoff(event.key, num_pages - 1))
        side.tick()
        time.sleep(0.002)


def pattern(num_pages: int) -> torch.Tensor:
    shape = new_pool(num_pages).buffer_LSNHPD.shape
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape)


DECODER = msgspec.msgpack.Decoder(SenderToReceiver)
