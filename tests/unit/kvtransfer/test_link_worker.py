"""The end of a link: when kernels outlive the host's patience, as those of NCCL do, and while it is rehearsed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch.distributed import DistStoreError

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import Link, LinkRate, LinkSpec
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.tcp import TcpLink
from tests.patience import PATIENCE_S
from tests.unit.kvtransfer.lone_link import (
    KEY,
    LoneFactory,
    grant,
    receive_worker,
    run_to_its_end,
    send_worker,
)
from tests.unit.kvtransfer.looks import slots_out


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

    slots_out: Callable[[], int] = lambda: 0
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


def sending(factory: LoneFactory) -> LinkWorker:
    worker = send_worker(factory)
    worker.accept(grant(0))
    return worker


def receiving(factory: LoneFactory) -> LinkWorker:
    worker = receive_worker(factory)
    worker.enqueue(KEY, [Chunk(0, 1, 0, 1)], bulk=False)
    return worker


@pytest.mark.parametrize("new_worker", [sending, receiving])
def test_a_link_that_timed_out_is_aborted_before_its_slots_are_free(
    new_worker: Callable[[LoneFactory], LinkWorker],
) -> None:
    link = StuckLink()
    worker = new_worker(LoneFactory(link))
    link.slots_out = lambda: slots_out(worker)
    assert run_to_its_end(worker).startswith("timed out")
    assert link.num_kernels == 1
    assert link.calls == [("abort", 1), ("close", 0)]


@dataclass
class Aborted(LoneFactory):
    """The peer aborts each link while it is rehearsed. Its `report` of why comes a moment later."""

    report: threading.Thread = field(kw_only=True)

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

    factory = Aborted(StuckLink(), report=threading.Timer(0.2, report))
    worker = send_worker(factory, rehearse=partial(rehearse, factory))
    worker.peer_report_s = PATIENCE_S if reported else 0.0
    death = run_to_its_end(worker)
    factory.report.join()
    assert death == "message 0 arrived corrupt" if reported else death.endswith("noticed")


@dataclass
class Closed(LoneFactory):
    """The peer has closed its end in the challenge. Its `report` of why comes a moment later."""

    report: threading.Thread = field(kw_only=True)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link:
        self.report.start()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.shutdown(socket.SHUT_WR)
            return TcpLink(spec, ours, on_dead, DeviceThreads())


@pytest.mark.parametrize("reported", [True, False])
def test_a_link_whose_peer_leaves_the_challenge_dies_of_what_the_peer_reports_if_that_comes(
    reported: bool,
) -> None:
    def report() -> None:
        if reported and worker.death is None:
            worker.stop("the peer failed the challenge")

    worker = send_worker(factory := Closed(report=threading.Timer(0.2, report)))
    worker.peer_report_s = PATIENCE_S if reported else 0.0
    death = run_to_its_end(worker)
    factory.report.join()
    assert death == ("the peer failed the challenge" if reported else "the peer is gone: end of file")
