"""The end of a link: when kernels outlive the host's patience, as those of NCCL do, and while it is rehearsed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import (
    RECEIVER,
    SENDER,
    Copier,
    Driver,
    Link,
    LinkRate,
    LinkSpec,
    Rehearse,
    Stepped,
)
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.link_worker import LinkLoop, LinkWorker
from shared.kvtransfer.receive_loop import ReceiveLoop
from shared.kvtransfer.send_loop import SendLoop
from shared.kvtransfer.staging import Slot, SlotRing
from shared.kvtransfer.transports.common import HeadedSlot, thread_copier
from shared.kvtransfer.transports.tcp import TcpLink
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Grant, GrantedChunk, Place
from tests.patience import PATIENCE_S
from tests.unit.kvtransfer.looks import slots_out

KEY = ReqKey("router", "a", 0)
PAGE_NBYTES = 8


class TimedOut:
    """A send or receive of which the host has given up, while its kernel uses the slot."""

    slot = header = None

    def __init__(self, release: Callable[[], None] = lambda: None) -> None:
        self.release = release

    def wait(self, *, block: bool) -> bool:
        raise LinkError("timed out")


@dataclass
class StuckLink:
    """A communicator whose peer says nothing. Kernels use their slots until the first abort."""

    slots_out: Callable[[], int]
    max_arrivals: int = 2
    num_kernels: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Each with the number of slots that were out."""

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Any:
        self.num_kernels += 1
        return TimedOut()

    def recv(self, nbytes: int, seq: int) -> Any:
        self.num_kernels += 1
        return TimedOut()

    def abort(self) -> None:
        self.calls.append(("abort", self.slots_out()))

    def close(self) -> None:
        self.calls.append(("close", self.slots_out()))


@dataclass
class Factory:
    """Builds `link`, which the test steps."""

    link: StuckLink

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link:
        return self.link

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return None

    def drive(self, name: str, loop: Stepped) -> Driver:
        return Undriven()

    def new_copier(self, name: str) -> Copier:
        raise AssertionError("the loop has one")

    def new_slot(self, nbytes: int) -> Slot:
        raise AssertionError("the ring makes them")


class Undriven:
    def join(self, timeout_s: float) -> bool:
        return True


class Pages:
    """One layer. It sends and wants whatever is asked of it."""

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return num_pages * num_layers * PAGE_NBYTES

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        return 0

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        raise AssertionError("nothing arrives")

    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int]:
        return [chunk.first_page]

    def end_gather(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None: ...

    def wants(self, key: ReqKey) -> bool:
        return True

    def is_hurried(self) -> bool:
        return False

    def begin_scatter(self, key: ReqKey, chunk: Chunk) -> None: ...

    def end_scatter(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None: ...

    def refused(self, key: ReqKey, reason: str, *, corrupt: bool = False) -> None: ...


def new_ring() -> SlotRing:
    return SlotRing(2, PAGE_NBYTES, lambda nbytes: Slot(torch.zeros(nbytes, dtype=torch.uint8)))


def sending() -> SendLoop:
    copier = thread_copier("test", DeviceThreads())
    loop = SendLoop(ring=new_ring(), pages=Pages(), num_layers=1, gate=Pages(), copier=copier)
    loop.accept(Grant("l", 0, (GrantedChunk(KEY, 0, 1, 0, 1, PAGE_NBYTES),)))
    return loop


def receiving() -> ReceiveLoop:
    loop = ReceiveLoop(name="l", pages=Pages(), gate=Pages(), send_grant=lambda grant: None)
    loop.enqueue(KEY, [Chunk(0, 1, 0, 1)], bulk=False)
    return loop


def new_worker(
    rank: int, loop: LinkLoop, factory: Factory, rehearse: Rehearse | None = None, peer_report_s: float = 0.0
) -> LinkWorker:
    return LinkWorker(
        spec=LinkSpec(
            name="l",
            rank=rank,
            secret=b"",
            slot_nbytes=PAGE_NBYTES,
            store=LinkStore(lambda name, value: None, PATIENCE_S),
        ),
        peer_id="p",
        transport="nccl",
        loop=loop,
        factory=factory,
        rehearse=rehearse,
        passed_over={},
        clock=time.monotonic,
        report_dead=lambda worker, reason: None if worker.death else worker.stop(reason),
        peer_report_s=peer_report_s,
    )


def run_to_its_end(worker: LinkWorker) -> str:
    """Why it died."""
    while not worker.finished:
        worker.step(block=True)
    assert worker.death is not None
    return worker.death


@pytest.mark.parametrize(("rank", "new_loop"), [(SENDER, sending), (RECEIVER, receiving)])
def test_a_link_that_timed_out_is_aborted_before_its_slots_are_free(
    rank: int, new_loop: Callable[[], LinkLoop]
) -> None:
    loop = new_loop()
    link = StuckLink(lambda: slots_out(loop))
    assert run_to_its_end(new_worker(rank, loop, Factory(link))).startswith("timed out")
    assert link.num_kernels == 1
    assert link.calls == [("abort", 1), ("close", 0)]


@dataclass
class Aborted(Factory):
    """The peer aborts each link while it is rehearsed. Its `report` of why comes a moment later."""

    report: threading.Thread

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link:
        self.on_dead = on_dead
        return self.link

    def noticed_by_an_op(self, link: Link, spec: LinkSpec, fail: Callable[[str], None]) -> LinkRate:
        self.report.start()
        fail("an op noticed")
        raise LinkError("an op noticed")

    def noticed_by_the_canary(self, link: Link, spec: LinkSpec, fail: Callable[[str], None]) -> LinkRate:
        self.report.start()
        with ThreadPoolExecutor(1) as canary:
            canary.submit(self.on_dead, "the canary noticed")
            try:
                spec.store.take("an answer")
            except DistStoreError as error:
                raise LinkError(str(error)) from None
        raise AssertionError("the peer says nothing")


@pytest.mark.parametrize("rehearse", [Aborted.noticed_by_an_op, Aborted.noticed_by_the_canary])
@pytest.mark.parametrize("reported", [True, False])
def test_a_link_that_ends_in_its_rehearsal_dies_of_what_the_peer_reports_if_that_comes(
    reported: bool, rehearse: Callable[..., LinkRate]
) -> None:
    def report() -> None:
        if reported and worker.death is None:
            worker.stop("message 0 arrived corrupt")

    factory = Aborted(StuckLink(lambda: 0), threading.Timer(0.2, report))
    peer_report_s = PATIENCE_S if reported else 0.0
    worker = new_worker(SENDER, sending(), factory, partial(rehearse, factory), peer_report_s)
    death = run_to_its_end(worker)
    factory.report.join()
    assert death == "message 0 arrived corrupt" if reported else death.endswith("noticed")


@dataclass
class Closed(Factory):
    """The peer has closed its end in the challenge. Its `report` of why comes a moment later."""

    report: threading.Thread

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link:
        self.report.start()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.shutdown(socket.SHUT_WR)
            ring = SlotRing(1, PAGE_NBYTES, lambda nbytes: HeadedSlot.new(nbytes, torch.device("cpu")))
            return TcpLink(spec, ours, ring, on_dead, DeviceThreads())


@pytest.mark.parametrize("reported", [True, False])
def test_a_link_whose_peer_leaves_the_challenge_dies_of_what_the_peer_reports_if_that_comes(
    reported: bool,
) -> None:
    def report() -> None:
        if reported and worker.death is None:
            worker.stop("the peer failed the challenge")

    factory = Closed(StuckLink(lambda: 0), threading.Timer(0.2, report))
    worker = new_worker(SENDER, sending(), factory, peer_report_s=PATIENCE_S if reported else 0.0)
    death = run_to_its_end(worker)
    factory.report.join()
    assert death == ("the peer failed the challenge" if reported else "the peer is gone: end of file")
