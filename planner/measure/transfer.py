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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from planner.measure.fitting import Point, fit_transfers, remarks_of
from planner.measure.forwards import OnProgress
from planner.profile import Residual, TransferCost
from shared.config import NetOptions, NodeConfig
from shared.engine.build import new_page_mover
from shared.engine.node_process import SWITCH_INTERVAL_S, presence_of
from shared.errors import ConfigError
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.queues import record_digest
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.sides import TransferSides, make_sides
from shared.kvtransfer.states import Received, ReceiveFailed, SendEnded
from shared.kvtransfer.transports.choice import make_transports
from shared.protocol.messages import KVLayout, NodeRef, ReqKey, Role
from shared.protocol.security import FleetKey
from shared.protocol.transfer_messages import Handoff, Ready

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


@contextlib.contextmanager
def _node(role: Role, shape: Shape) -> Iterator[tuple[NodeRef, TransferSides, threading.Event]]:
    """A node without a model: its name, both sides over a pool on the device, and what wakes its scheduler."""
    layout, device, wake = shape.layout, torch.device(shape.device), threading.Event()
    config = replace(shape.config, net=NetOptions())
    pool = TokenToKVPool(
        num_pages=shape.num_pages + 1,
        page_size=layout.page_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=getattr(torch, layout.kv_cache_dtype or layout.dtype),
        device=device,
        mover=new_page_mover(config.model.attention_backend, device),
    )
    with presence_of(role, config, "127.0.0.1", FleetKey.load(shape.config.net.fleet_key)) as presence:
        end = Endpoint(
            node=presence.node,
            layout=layout,
            pages=pool,
            outbox=presence.control.to_dialled,
            transports=make_transports(config.transfer, device),
            clock=time.monotonic,
            options=config.transfer,
            wake=wake.set,
        )
        with contextlib.closing(make_sides(end, presence.control)) as sides:
            presence.control.admit(sides.handlers())
            yield presence.node, sides, wake


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
    on_progress("a second process starts")
    with (
        _node(Role.DECODE, shape) as (node, sides, wake),
        contextlib.closing(_Receiving(shape, node, sides.receiver, wake)) as receiving,
    ):
        receiving.transfer_s(1)
        begin = time.monotonic()
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
        Point(what=f"transfer {size}", row=(1, size), seconds=tuple(took)) for size, took in rounds.items()
    ]
    latency_s, bytes_s = fit_transfers(points)
    cost = TransferCost(latency_s=latency_s, bytes_s=bytes_s, message_s=statistics.median(messages))
    residuals = [point.residual((latency_s, 1 / bytes_s)) for point in points]
    return cost, residuals, list(remarks_of(points, residuals))


class _Receiving:
    """This process: opens transfers, and notes when they have come."""

    def __init__(self, shape: Shape, node: NodeRef, receiver: KVReceiver, wake: threading.Event) -> None:
        self._num_transfers = 0
        self._random = np.random.default_rng(0)
        self._num_pages = shape.num_pages
        self._receiver, self._wake = receiver, wake
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._child = context.Process(target=_send, args=(there, node, shape), daemon=True)
        self._child.start()
        there.close()
        self._sender = str(self._hear())

    def transfer_s(self, num_pages: int) -> tuple[float, float]:
        """Move so many pages, in the random order of a pool that is in use: seconds of Ready, and of the pages."""
        self._num_transfers += 1
        key = ReqKey("measured", str(self._num_transfers))
        pages = (self._random.permutation(self._num_pages)[:num_pages] + 1).tolist()
        self._pipe.send((key, pages))
        self._hear()  # it has opened the transfer
        opened_at = time.monotonic()
        self._receiver.open(key, self._sender, pages, 0)
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

    def _hear(self) -> Any:
        """What the child says: its name, and then times."""
        with contextlib.suppress(EOFError):  # it has ended
            if self._pipe.poll(_TIMEOUT_S):
                return self._pipe.recv()
        raise ConfigError("the second process has ended, or says nothing: see its error above")

    def close(self) -> None:
        """End the child."""
        if self._child.is_alive():
            self._pipe.send(None)
        self._child.join(_TIMEOUT_S)
        self._pipe.close()


def _send(pipe: Connection, receiving: NodeRef, shape: Shape) -> None:
    """The child: what a prefill scheduler does, without a model."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    with (
        _node(Role.PREFILL, shape) as (node, sides, wake),
        contextlib.suppress(EOFError),  # the measuring process is gone
    ):
        pipe.send(node.incarnation)
        sides.peering.ensure(receiving)
        while (wanted := pipe.recv()) is not None:
            key, pages = wanted
            sides.sender.open(key, receiving.incarnation)
            pipe.send(time.monotonic())
            pipe.send(_send_pages(sides.sender, wake, key, pages, shape.layout.page_size))


def _send_pages(
    sender: KVSender, wake: threading.Event, key: ReqKey, pages: Sequence[int], page_size: int
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
