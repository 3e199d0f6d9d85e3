"""How fast do KV pages move through the whole path (gather, send, scatter), against raw gloo in the same run?

Two processes on loopback. In each round the same bytes move both ways of sending: raw gloo (4 MB messages, 4 in
flight, nothing but send and recv) and the whole path (offers, grants, gather, digest, send, digest, scatter).
"""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.config import TransferOptions
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.layout import record_digest
from shared.kvtransfer.link import make_link_factory
from shared.kvtransfer.receiver import ReceiveSide
from shared.kvtransfer.sender import SendSide
from shared.kvtransfer.states import Received
from shared.protocol.channel import ControlThread, Guests
from shared.protocol.messages import (
    DecodeToPrefill,
    Handoff,
    KVLayout,
    NodeRef,
    PrefillToDecode,
    Ready,
    ReqKey,
)
from tests.bench.table import Row

NUM_LAYERS, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 16, 8, 16, 64
LAYOUT = KVLayout("bench", "bfloat16", PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
PAGES_PER_TRANSFER = 64
TRANSFERS_PER_ROUND = 16
ROUNDS = 9
MESSAGE_BYTES = 4 << 20
IN_FLIGHT = 4
CPU = torch.device("cpu")


def make_pool() -> TokenToKVPool:
    return TokenToKVPool(
        num_pages=PAGES_PER_TRANSFER * TRANSFERS_PER_ROUND + 1,
        page_size=PAGE_SIZE,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=CPU,
    )


def round_bytes() -> int:
    return 2 * NUM_LAYERS * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM * 2 * PAGES_PER_TRANSFER * TRANSFERS_PER_ROUND


def page_ids(i: int) -> list[int]:
    """Pages of transfer i, scattered over the pool as they are after a while of serving."""
    ids = (
        torch.randperm(PAGES_PER_TRANSFER * TRANSFERS_PER_ROUND, generator=torch.Generator().manual_seed(1))
        + 1
    )
    part: list[int] = ids[i * PAGES_PER_TRANSFER : (i + 1) * PAGES_PER_TRANSFER].tolist()
    return part


def keys(round_: int) -> list[ReqKey]:
    return [ReqKey("bench", f"{round_}-{i}") for i in range(TRANSFERS_PER_ROUND)]


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


def prefill_side(pipe: Connection, address: str, port: int, options: TransferOptions) -> None:
    """The child: sends when told."""
    torch.set_num_threads(1)
    pool, control, wake = make_pool(), ControlThread(), threading.Event()
    pool.buffer_LSNHPD.normal_()
    node = NodeRef("p", "p#1", "tcp://nowhere:0")
    sender = SendSide(
        node=node,
        layout=LAYOUT,
        pages=pool,
        outbox=control,
        link_factory=make_link_factory("gloo", options, CPU),
        clock=time.monotonic,
        options=options,
        wake=wake.set,
    )
    control.start()
    guests = Guests(msgspec.msgpack.Decoder(DecodeToPrefill), sender.on_message)
    control.dial("d#1", address, "prefill|p#1", guests, sender.on_connected, sender.on_disconnected)
    raw = RawGloo(1, port)
    while (command := pipe.recv()) is not None:
        kind, round_ = command
        if kind == "raw":
            raw.move(round_bytes())
            continue
        places = {key: i for i, key in enumerate(keys(round_))}
        for key in places:
            sender.open(key, "d#1")
        pending = set(places)
        while pending:
            wake.wait(0.1)
            wake.clear()
            sender.tick()
            for event in sender.poll():
                if isinstance(event, Ready):
                    sender.offer(event.key, page_ids(places[event.key]))
                    kv_len = PAGES_PER_TRANSFER * PAGE_SIZE
                    digest = record_digest([1], [], [2], kv_len)
                    sender.handoff(
                        event.key, Handoff(event.key, PAGES_PER_TRANSFER, 0, (2,), kv_len, digest, 0, ())
                    )
                else:
                    assert event.ok, event
                    pending.discard(event.key)
    sender.close()
    control.close()


def main() -> list[dict[str, Any]]:
    """Measure with the default staging slots, and with few large ones."""
    defaults = TransferOptions()
    large = TransferOptions(slot_nbytes=16 << 20)
    return [measure(options) for options in (defaults, large)]


def measure(options: TransferOptions) -> dict[str, Any]:
    """Run both ways in turn and return the figures."""
    torch.set_num_threads(1)
    pool, control, wake = make_pool(), ControlThread(), threading.Event()
    port = control.bind("127.0.0.1", 0)
    receiver = ReceiveSide(
        node=NodeRef("d", "d#1", f"tcp://127.0.0.1:{port}"),
        layout=LAYOUT,
        pages=pool,
        outbox=control,
        link_factory=make_link_factory("gloo", options, CPU),
        clock=time.monotonic,
        options=options,
        wake=wake.set,
    )
    control.start()
    control.admit({"prefill": Guests(msgspec.msgpack.Decoder(PrefillToDecode), receiver.on_message)})
    listener = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    raw_port = listener.port
    del listener
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(
        target=prefill_side, args=(there, f"tcp://127.0.0.1:{port}", raw_port, options), daemon=True
    )
    child.start()
    raw = RawGloo(0, raw_port)
    raw_gbs, path_gbs = [], []
    for round_ in range(ROUNDS + 1):
        here.send(("raw", round_))
        raw_s = raw.move(round_bytes())
        here.send(("path", round_))
        start = time.perf_counter()
        for i, key in enumerate(keys(round_)):
            receiver.open(key, "p#1", page_ids(i), 0)
        left = TRANSFERS_PER_ROUND
        while left:
            wake.wait(0.1)
            wake.clear()
            receiver.tick()
            for event in receiver.poll():
                assert isinstance(event, Received), event
                left -= 1
        path_s = time.perf_counter() - start
        if round_:  # the first is for warming up
            raw_gbs.append(round_bytes() / raw_s / 1e9)
            path_gbs.append(round_bytes() / path_s / 1e9)
    here.send(None)
    child.join(20)
    receiver.close()
    control.close()
    ratios = [path / limit for path, limit in zip(path_gbs, raw_gbs, strict=True)]
    return {
        "bench": "transfer",
        "slots": f"{options.num_slots} x {options.slot_nbytes >> 20} MiB",
        "mib_per_round": round_bytes() >> 20,
        "raw_gloo_gb_s": round(statistics.median(raw_gbs), 3),
        "whole_path_gb_s": round(statistics.median(path_gbs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "rounds": ROUNDS,
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the default slots and of the best: the whole path over raw gloo."""
    return {"ratio": rows[0]["ratio"], "best_ratio": max(row["ratio"] for row in rows)}
