"""How fast do KV pages move through the whole path, against what carries them, in the same run?

Two processes on loopback, pages scattered over pools that no cache holds. In each round a batch of transfers moves
(offers, grants, gather, send, scatter, digests), then the same bytes by the limit: on gloo raw gloo
(4 MB messages, 4 in flight, nothing but send and recv), on shared memory one thread's memcpy.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.config import TransferOptions
from shared.engine.build import new_page_mover
from shared.engine.node_process import SWITCH_INTERVAL_S
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.queues import record_digest
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import Received
from shared.kvtransfer.transports.choice import HOST_SLOT_NBYTES, make_transports
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import KVLayout, NodeRef, ReqKey
from shared.protocol.transfer_messages import Handoff, Ready, ReceiverToSender, SenderToReceiver
from tests.bench.limits import Memcpy
from tests.bench.stats import figure, ratios
from tests.bench.table import Row

NUM_LAYERS, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 16, 8, 16, 64
LAYOUT = KVLayout("bench", "bfloat16", PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
PAGE_NBYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM * 2
"""One page of all layers: 512 KiB."""
NUM_PAGES = 1024
PAGES_PER_TRANSFER = 64
BATCHES = {1: 64, 16: 16, 64: 6, 256: 2}
"""MiB of a batch of transfers, and how many such batches follow each other in a round."""
ROUNDS = 9
MESSAGE_BYTES = 4 << 20
IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides have in common."""

    options: TransferOptions
    layout: KVLayout = LAYOUT
    num_pages: int = NUM_PAGES
    """Of each pool."""
    device: str = "cpu"

    def make_pool(self) -> TokenToKVPool:
        """A pool on the device."""
        layout = self.layout
        return TokenToKVPool(
            num_pages=self.num_pages + 1,
            page_size=layout.page_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=torch.bfloat16,
            device=torch.device(self.device),
            mover=new_page_mover("auto", torch.device(self.device)),
        )


@dataclass(frozen=True)
class Batch:
    """Transfers that are opened at once, over pools of `pool_pages` pages."""

    number: int
    num_pages: int
    pool_pages: int

    def transfers(self) -> dict[ReqKey, list[int]]:
        """The pages of each transfer, the same on both sides, in the random order of a pool that is in use."""
        pages = np.random.default_rng(self.number).permutation(self.pool_pages)[: self.num_pages] + 1
        parts = [pages[at : at + PAGES_PER_TRANSFER] for at in range(0, self.num_pages, PAGES_PER_TRANSFER)]
        return {ReqKey("bench", f"{self.number}-{i}"): part.tolist() for i, part in enumerate(parts)}


class RawGloo:
    """Nothing but a pair group and staging buffers."""

    def __init__(self, rank: int, port: int) -> None:
        store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=30)
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
        self.group: Any = ProcessGroupGloo(store, rank, 2, options)  # type: ignore[call-arg,arg-type]
        self.buffers = [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
        self.rank = rank
        self.tag = 0

    def move(self, nbytes: int) -> float:
        """Move `nbytes` from rank 1 to rank 0; returns seconds."""
        start = time.perf_counter()
        works: deque[Any] = deque()
        for i in range(nbytes // MESSAGE_BYTES):
            if len(works) == IN_FLIGHT:
                works.popleft().wait()
            op = self.group.recv if self.rank == 0 else self.group.send
            works.append(op([self.buffers[i % IN_FLIGHT]], 1 - self.rank, self.tag))
            self.tag += 1
        while works:
            works.popleft().wait()
        return time.perf_counter() - start


def prefill_side(pipe: Connection, address: str, port: int, setting: Setting) -> None:
    """The child: sends when told."""
    behave_like_a_node()
    pool, control, wake = setting.make_pool(), ControlThread(), threading.Event()
    pool.buffer_LSNHPD.normal_()
    sender = KVSender(
        Endpoint(
            node=NodeRef("p", "p#1", "tcp://nowhere:0"),
            layout=setting.layout,
            pages=pool,
            outbox=control.to_dialled,
            transports=make_transports(setting.options, torch.device(setting.device)),
            clock=time.monotonic,
            options=setting.options,
            wake=wake.set,
        )
    )
    control.start()
    handlers = Handlers(msgspec.msgpack.Decoder(ReceiverToSender), sender.on_message)
    control.dial("d#1", address, "sender|p#1", handlers, sender.on_connected, sender.on_disconnected)
    raw = RawGloo(1, port)
    while (command := pipe.recv()) is not None:
        if isinstance(command, int):
            raw.move(command)
        else:
            send_batch(sender, command, wake)
    sender.close()
    control.close()


def behave_like_a_node() -> None:
    """As far as it matters to the threads of a transfer."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def send_batch(sender: KVSender, batch: Batch, wake: threading.Event) -> None:
    """What a prefill scheduler does, without a model."""
    pending = batch.transfers()
    for key in pending:
        sender.open(key, "d#1")
    while pending:
        wake.wait(0.1)
        wake.clear()
        sender.tick()
        for event in sender.poll():
            if isinstance(event, Ready):
                pages = pending[event.key]
                sender.offer(event.key, pages)
                kv_len = len(pages) * PAGE_SIZE
                digest = record_digest([1], [], [2], kv_len)
                sender.handoff(event.key, Handoff(event.key, len(pages), (2,), kv_len, digest, 0, ()))
            else:
                assert event.ok, event
                del pending[event.key]


class DecodeSide:
    """This process: receives, and measures."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pool, self.control, self.wake = setting.make_pool(), ControlThread(), threading.Event()
        port = self.control.bind("127.0.0.1", 0)
        self.receiver = KVReceiver(
            Endpoint(
                node=NodeRef("d", "d#1", f"tcp://127.0.0.1:{port}"),
                layout=setting.layout,
                pages=self.pool,
                outbox=self.control.to_diallers,
                transports=make_transports(setting.options, torch.device(setting.device)),
                clock=time.monotonic,
                options=setting.options,
                wake=self.wake.set,
            )
        )
        self.control.start()
        prefill = Handlers(msgspec.msgpack.Decoder(SenderToReceiver), self.receiver.on_message)
        self.control.admit({"sender": prefill})
        listener = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        raw_port = listener.port
        del listener
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.child = context.Process(
            target=prefill_side,
            args=(there, f"tcp://127.0.0.1:{port}", raw_port, setting),
            daemon=True,
        )
        self.child.start()
        self.raw = RawGloo(0, raw_port)
        self.num_batches = 0

    def batch_s(self, num_pages: int) -> float:
        """Seconds from opening a batch to having all of it."""
        batch = Batch(self.num_batches, num_pages, self.setting.num_pages)
        self.num_batches += 1
        transfers = batch.transfers()
        self.pipe.send(batch)
        start = time.perf_counter()
        for key, pages in transfers.items():
            self.receiver.open(key, "p#1", pages, 0)
        left = len(transfers)
        while left:
            self.wake.wait(0.1)
            self.wake.clear()
            self.receiver.tick()
            for event in self.receiver.poll():
                assert isinstance(event, Received), event
                left -= 1
        return time.perf_counter() - start

    def raw_s(self, nbytes: int) -> float:
        """Seconds that raw gloo takes."""
        self.pipe.send(nbytes)
        return self.raw.move(nbytes)

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join(20)
        self.receiver.close()
        self.control.close()


def main() -> Iterator[dict[str, Any]]:
    """By what carries the pages, by size, and on gloo also with few large staging slots."""
    for backend in ("gloo", "shm"):
        yield from measure(TransferOptions(backend=backend), BATCHES)
    yield from measure(TransferOptions(backend="gloo", slot_nbytes=16 << 20), {256: BATCHES[256]})


def measure(options: TransferOptions, batches: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Run a backend and its limit in turn."""
    behave_like_a_node()
    decode = DecodeSide(Setting(options=options))
    memcpy = Memcpy([min(os.sched_getaffinity(0))])
    for mib, num_batches in batches.items():
        path, limit = [], []
        for round_ in range(ROUNDS + 1):
            nbytes = num_batches * mib << 20
            path_s = sum(decode.batch_s((mib << 20) // PAGE_NBYTES) for _ in range(num_batches))
            limit_gb_s = memcpy.gb_s() if options.backend == "shm" else nbytes / decode.raw_s(nbytes) / 1e9
            if round_:  # the first is for warming up
                path.append(nbytes / path_s / 1e9)
                limit.append(limit_gb_s)
        yield {
            "bench": "transfer",
            "backend": options.backend,
            "slots": f"{options.num_slots} x {(options.slot_nbytes or HOST_SLOT_NBYTES) >> 20} MiB",
            "batch_mib": mib,
            **figure("whole_path_gb_s", path),
            "limit": "memcpy" if options.backend == "shm" else "raw gloo",
            **figure("limit_gb_s", limit),
            **figure("ratio", ratios(path, limit)),
            "rounds": ROUNDS,
        }
    decode.close()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The whole path over what carries it, of the largest batches and the default slots."""
    return {f"{row['backend']}_ratio": row["ratio"] for row in reversed(rows) if row["batch_mib"] == 256}
