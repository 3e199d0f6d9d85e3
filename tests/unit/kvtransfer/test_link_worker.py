"""The end of a link: when kernels outlive the host's patience, as those of NCCL do, and while it is rehearsed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


NOTICED = {
    "op": "an op noticed",
    "canary": "the canary noticed",
    "challenge": "the peer is gone: end of file",
}
"""What notices that the peer has ended a link which is being built, and what is said of it then."""


@dataclass
class Ending(LoneFactory):
    """The peer ends each link in its challenge or rehearsal. Its `report` of why comes a moment later."""

    how: str = field(kw_only=True)
    report: threading.Thread = field(kw_only=True)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link:
        self.report.start()
        self.on_dead = on_dead
        if self.how != "challenge":
            return StuckLink()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.shutdown(socket.SHUT_WR)
            return TcpLink(spec, ours, on_dead, DeviceThreads())

    def rehearse(self, link: Link, spec: LinkSpec, fail: Callable[[str], None]) -> LinkRate:
        if self.how == "op":
            fail(NOTICED["op"])
            raise LinkError(NOTICED["op"])
        with ThreadPoolExecutor(1) as canary:
            canary.submit(self.on_dead, NOTICED["canary"])
            try:
                spec.store.take("an answer")
            except DistStoreError as error:
                raise LinkError(str(error)) from None
        raise AssertionError("the peer says nothing")


@pytest.mark.parametrize("how", NOTICED)
@pytest.mark.parametrize("reported", [True, False])
def test_a_link_that_ends_while_it_is_built_dies_of_what_the_peer_reports_if_that_comes(
    reported: bool, how: str
) -> None:
    def report() -> None:
        if reported and worker.death is None:
            worker.stop("message 0 arrived corrupt")

    factory = Ending(how=how, report=threading.Timer(0.2, report))
    worker = send_worker(factory, rehearse=factory.rehearse)
    worker.peer_report_s = PATIENCE_S if reported else 0.0
    death = run_to_its_end(worker)
    factory.report.join()
    assert death == ("message 0 arrived corrupt" if reported else NOTICED[how])
