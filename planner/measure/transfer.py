"""How long pages take from one node to another: the real sender and receiver, in two processes of this machine.

A process stands for each node, with a pool on the node's device and links as `--kv-transfer` says. Pages are offered
all at once; what counts is the time from the offer until the receiving scheduler hears that all have come. The
message before that, which says that there is room, is measured too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from planner.measure.fitting import Point, fit_transfers, remarks_of
from planner.measure.forwards import OnProgress
from planner.measure.machine import watched
from planner.profile import Residual, TransferCost
from shared.config import NodeConfig
from shared.engine.build import new_page_mover
from shared.engine.node_process import SWITCH_INTERVAL_S
from shared.errors import ConfigError
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.layout import record_digest
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import Received, ReceiveFailed, SendEnded
from shared.kvtransfer.transports.choice import make_transports
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import KVLayout, NodeRef, ReqKey
from shared.protocol.security import FleetKey
from shared.protocol.transfer_messages import Handoff, Ready, ReceiverToSender, SenderToReceiver

MAX_NBYTES = 256 << 20
"""Of one transfer: more only takes longer."""
MAX_ROUNDS = 20
_TIMEOUT_S = 60.0
"""Until a child that has torch to import has built its link, and until a transfer has ended."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What both sides have in common."""

    config: NodeConfig
    layout: KVLayout
    page_nbytes: int
    device: str
    num_pages: int
    """Of the longest transfer; each pool has as many."""

    def endpoint(
        self, node: NodeRef, control: ControlThread, wake: threading.Event, *, dialled: bool
    ) -> Endpoint:
        """One side, with a pool on the device."""
        layout, device = self.layout, torch.device(self.device)
        pool = TokenToKVPool(
            num_pages=self.num_pages + 1,
            page_size=layout.page_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=getattr(torch, layout.kv_cache_dtype or layout.dtype),
            device=device,
            mover=new_page_mover(self.config.model.attention_backend, device),
        )
        return Endpoint(
            node=node,
            layout=layout,
            pages=pool,
            outbox=control.to_dialled if dialled else control.to_diallers,
            transports=make_transports(self.config.transfer, device),
            clock=time.monotonic,
            options=self.config.transfer,
            wake=wake.set,
        )


def measure_transfers(
    shape: Shape, seconds: float, on_progress: OnProgress
) -> tuple[TransferCost, list[Residual], list[str]]:
    """Transfers of 1, 4, 16 .. pages, in turn until the time is up: their cost, every size against it, and remarks.

    The first round is dropped: it builds the link. Raises ConfigError when no link can be built.
    """
    sizes = [1]
    while sizes[-1] < shape.num_pages:
        sizes.append(min(4 * sizes[-1], shape.num_pages))
    rounds: defaultdict[int, list[float]] = defaultdict(list)
    messages: list[float] = []
    remarks: list[str] = []
    on_progress("a second process starts")
    with contextlib.closing(_ReceivingNode(shape)) as receiving:
        receiving.transfer_s(1)
        begin = time.monotonic()
        with watched("the transfer", remarks, [receiving.child_pid]):
            for number in range(MAX_ROUNDS + 1):
                if number > 2 and time.monotonic() - begin > seconds:
                    break
                for size in sizes:
                    on_progress(f"transfer of {size * shape.page_nbytes >> 10} KiB")
                    message_s, took_s = receiving.transfer_s(size)
                    if number:
                        rounds[size * shape.page_nbytes].append(took_s)
                        messages.append(message_s)
    points = [
        Point(what=f"transfer {nbytes}", row=(1, nbytes), seconds=tuple(took))
        for nbytes, took in rounds.items()
    ]
    latency_s, bytes_s = fit_transfers(points)
    cost = TransferCost(latency_s=latency_s, bytes_s=bytes_s, message_s=statistics.median(messages))
    residuals = [point.residual((latency_s, 1 / cost.bandwidth_bytes_s)) for point in points]
    return cost, residuals, [*remarks, *remarks_of(points, residuals)]


class _ReceivingNode:
    """This process: opens transfers, and notes when they have come."""

    def __init__(self, shape: Shape) -> None:
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._num_transfers = 0
        self._random = np.random.default_rng(0)
        self._num_pages = shape.num_pages
        self._wake = threading.Event()
        key = FleetKey.load(shape.config.net.fleet_key)
        self._control = ControlThread(key)
        port = self._control.bind("127.0.0.1", 0)
        node = NodeRef("d", "d#1", f"tcp://127.0.0.1:{port}")
        self._receiver = KVReceiver(shape.endpoint(node, self._control, self._wake, dialled=False))
        self._control.start()
        sender = Handlers(msgspec.msgpack.Decoder(SenderToReceiver), self._receiver.on_message)
        self._control.admit({"sender": sender})
        self._control.every(self._receiver.renewal_s, self._receiver.renew_leases)
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._child = context.Process(target=_send, args=(there, node.address, shape), daemon=True)
        self._child.start()
        there.close()

    def transfer_s(self, num_pages: int) -> tuple[float, float]:
        """Move so many pages, in the random order of a pool that is in use: seconds of Ready, and of the pages."""
        self._num_transfers += 1
        key = ReqKey("measured", str(self._num_transfers))
        pages = (self._random.permutation(self._num_pages)[:num_pages] + 1).tolist()
        self._pipe.send((key, pages))
        self._hear()  # it has opened the transfer
        opened_at = time.monotonic()
        self._receiver.open(key, "p#1", pages, 0)
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            self._wake.wait(0.1)
            self._wake.clear()
            self._receiver.tick()
            for event in self._receiver.poll():
                received_at = time.monotonic()
                match event:
                    case Received():
                        offered_at = self._hear()
                        return offered_at - opened_at, received_at - offered_at
                    case ReceiveFailed(reason=reason):
                        raise ConfigError(
                            f"pages do not move between two processes of this machine: {reason}"
                        )
            if not self._child.is_alive():
                break
        raise ConfigError(f"pages do not move between two processes of this machine within {_TIMEOUT_S:g} s")

    @property
    def child_pid(self) -> int:
        """Of the second process."""
        assert self._child.pid is not None
        return self._child.pid

    def _hear(self) -> float:
        """A time that the child says."""
        if not self._pipe.poll(_TIMEOUT_S):
            raise ConfigError(f"the second process has said nothing for {_TIMEOUT_S:g} s")
        try:
            said_at: float = self._pipe.recv()
        except EOFError:
            raise ConfigError(
                "the second process has ended before its transfers: see its error above"
            ) from None
        return said_at

    def close(self) -> None:
        """End both sides."""
        sys.setswitchinterval(self._switch_interval_s)
        if self._child.is_alive():
            self._pipe.send(None)
        self._child.join(_TIMEOUT_S)
        self._pipe.close()
        self._receiver.close()
        self._control.close()


def _send(pipe: Connection, address: str, shape: Shape) -> None:
    """The child: what a prefill scheduler does, without a model."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    control, wake = ControlThread(FleetKey.load(shape.config.net.fleet_key)), threading.Event()
    node = NodeRef("p", "p#1", "tcp://nowhere:0")
    sender = KVSender(shape.endpoint(node, control, wake, dialled=True))
    control.start()
    handlers = Handlers(msgspec.msgpack.Decoder(ReceiverToSender), sender.on_message)
    control.dial("d#1", address, "sender|p#1", handlers, sender.on_connected, sender.on_disconnected)
    try:
        while (wanted := pipe.recv()) is not None:
            key, pages = wanted
            sender.open(key, "d#1")
            pipe.send(time.monotonic())
            pipe.send(_send_pages(sender, key, pages, shape.layout.page_size, wake))
    except EOFError:
        pass  # the measuring process is gone
    sender.close()
    control.close()


def _send_pages(
    sender: KVSender, key: ReqKey, pages: Sequence[int], page_size: int, wake: threading.Event
) -> float:
    """Send, and return when the pages were offered."""
    offered_at = 0.0
    while True:
        wake.wait(0.1)
        wake.clear()
        sender.tick()
        for event in sender.poll():
            match event:
                case Ready():
                    kv_len = len(pages) * page_size
                    digest = record_digest([1], [], [2], kv_len)
                    offered_at = time.monotonic()
                    sender.offer(key, pages)
                    sender.handoff(key, Handoff(key, len(pages), (2,), kv_len, digest, 0, ()))
                case SendEnded():
                    return offered_at
