from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.errors import LinkError
from shared.kvtransfer.copier import thread_copier
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import Driver, Link, LinkSpec, Stepped
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.send_loop import SendLoop
from shared.kvtransfer.staging import HEADER_NBYTES, SlotRing
from shared.protocol.messages import Grant, ReqKey

KEY = ReqKey("router", "a", 0)
PAGE_NBYTES = 8


class Pages:
    """One layer; `failure` is raised by gathers."""

    failure: Exception | None = None

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return num_pages * num_layers * PAGE_NBYTES

    def gather(self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor) -> None:
        if self.failure is not None:
            raise self.failure
        out.fill_(page_ids[0])

    def scatter(self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor) -> None:
        raise AssertionError("a sender scatters nothing")


class Gate:
    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        return [chunk.first_page]

    def end_gather(self, key: ReqKey, nbytes: int) -> None:
        pass


class DoneOp:
    def wait(self, *, block: bool) -> bool:
        return True


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, buffer: torch.Tensor, seq: int) -> DoneOp:
        assert seq == len(self.sent)
        self.sent.append(int(buffer[HEADER_NBYTES]))
        return DoneOp()

    def recv(self, buffer: torch.Tensor, seq: int) -> DoneOp:
        raise AssertionError("a sender receives nothing")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def new_loop(pages: Pages, num_slots: int = 2) -> SendLoop:
    ring = SlotRing(num_slots, PAGE_NBYTES, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    return SendLoop(ring=ring, pages=pages, num_layers=1, gate=Gate(), copier=thread_copier("test"))


def grant(seq: int) -> Grant:
    nbytes = HEADER_NBYTES + PAGE_NBYTES
    return Grant(
        link="l", seq=seq, key=KEY, first_page=seq, num_pages=1, first_layer=0, num_layers=1, nbytes=nbytes
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_chunks_go_out_in_the_order_of_their_grants_through_fewer_slots() -> None:
    loop, link = new_loop(Pages()), RecordingLink()
    for seq in range(20):
        loop.accept(grant(seq))
    while len(link.sent) < 20:
        loop.step(link, block=True)
    assert link.sent == list(range(20))
    assert loop.drain(block=True)
    assert loop.num_slots_out == 0


def test_chunks_are_gathered_while_the_link_is_busy() -> None:
    loop = new_loop(Pages())
    for seq in range(3):
        loop.accept(grant(seq))
    wait_until(lambda: loop.num_slots_out == 2)  # without a step: nobody has sent anything
    assert loop.drain(block=True)
    assert loop.num_slots_out == 0


def test_a_gather_that_fails_ends_the_link_and_keeps_no_slot() -> None:
    pages = Pages()
    pages.failure = RuntimeError("device lost")
    loop, link = new_loop(pages), RecordingLink()
    loop.accept(grant(0))

    def step_until_it_is_gathered() -> None:
        while not loop.step(link, block=True):
            pass

    with pytest.raises(RuntimeError, match="device lost"):
        step_until_it_is_gathered()
    assert loop.drain(block=True)
    assert loop.num_slots_out == 0


def test_a_grant_for_a_link_that_is_never_built_leaves_nothing_behind() -> None:
    class NeverBuilt:
        def drive(self, name: str, loop: Stepped) -> Driver:
            raise AssertionError("stepped by the test")

        def new_copier(self, name: str) -> ThreadPoolExecutor:
            raise AssertionError("made by the test")

        def new_buffer(self, nbytes: int) -> torch.Tensor:
            raise AssertionError("made by the ring")

        def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
            raise LinkError("the peer did not come in time")

    loop = new_loop(Pages())
    worker = LinkWorker(
        spec=LinkSpec(name="l", rank=1, secret=b"", store=LinkStore(lambda entry, value: None, 1.0)),
        peer_id="d",
        loop=loop,
        factory=NeverBuilt(),
        clock=time.monotonic,
        report_dead=lambda worker, reason: worker.stop(reason),
    )
    loop.accept(grant(0))
    wait_until(lambda: loop.num_slots_out == 1)
    while not worker.finished:
        worker.step(block=True)
    assert loop.num_slots_out == 0
    assert worker.death == "the peer did not come in time"
