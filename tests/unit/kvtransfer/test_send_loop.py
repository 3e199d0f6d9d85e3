from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import Arrival, Driver, Link, LinkSpec, Stepped
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.send_loop import SendLoop
from shared.kvtransfer.staging import Slot, SlotRing
from shared.kvtransfer.transports.common import thread_copier
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Grant, GrantedChunk, Place
from tests.patience import until
from tests.unit.kvtransfer.looks import slots_out

KEY = ReqKey("router", "a", 0)
PAGE_NBYTES = 8


class Pages:
    """One layer; `failure` is raised by gathers."""

    failure: Exception | None = None

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return num_pages * num_layers * PAGE_NBYTES

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        if self.failure is not None:
            raise self.failure
        out.fill_(page_ids[0])
        return 0

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        raise AssertionError("a sender scatters nothing")


class Gate:
    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        return [chunk.first_page]

    def end_gather(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None:
        pass


class DoneOp:
    def wait(self, *, block: bool) -> bool:
        return True


class RecordingLink:
    failure: LinkError | None = None

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> DoneOp:
        if self.failure is not None:
            raise self.failure
        assert seq == len(self.sent)
        self.sent.append(int(slot.payload(nbytes)[0]))
        return DoneOp()

    def recv(self, nbytes: int, seq: int) -> Arrival:
        raise AssertionError("a sender receives nothing")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def new_slot(nbytes: int) -> Slot:
    return Slot(torch.zeros(nbytes, dtype=torch.uint8))


def new_loop(pages: Pages, ring: SlotRing | None = None) -> SendLoop:
    return SendLoop(
        ring=ring or SlotRing(2, PAGE_NBYTES, new_slot),
        pages=pages,
        num_layers=1,
        gate=Gate(),
        copier=thread_copier("test", DeviceThreads()),
    )


def grant(seq: int, num_chunks: int = 1) -> Grant:
    chunks = (GrantedChunk(KEY, seq + i, 1, 0, 1, PAGE_NBYTES) for i in range(num_chunks))
    return Grant("l", seq, tuple(chunks))


def step_until_it_fails(loop: SendLoop) -> None:
    while True:
        loop.step(block=True)


def test_chunks_go_out_in_the_order_of_their_grants_through_fewer_slots() -> None:
    loop, link = new_loop(Pages()), RecordingLink()
    for seq in range(10):
        loop.accept(grant(seq))
    loop.attach(link)  # the peer was faster
    loop.accept(grant(10, num_chunks=10))
    loop.accept(grant(10, num_chunks=10))  # a message that came twice
    while len(link.sent) < 20 or slots_out(loop):
        loop.step(block=True)
    assert link.sent == list(range(20))
    assert loop.drain(block=True)


def test_chunks_are_gathered_and_sent_while_earlier_ones_are_on_their_way() -> None:
    loop, link = new_loop(Pages()), RecordingLink()
    loop.attach(link)
    for seq in range(3):
        loop.accept(grant(seq))
    until(lambda: link.sent == [0, 1])  # without a step, so no send has been seen to leave its slot
    assert slots_out(loop) == 2
    assert loop.drain(block=True)
    assert slots_out(loop) == 0


def test_a_gather_that_fails_ends_the_link_and_keeps_no_slot() -> None:
    pages = Pages()
    pages.failure = RuntimeError("device lost")
    loop = new_loop(pages)
    loop.attach(RecordingLink())
    loop.accept(grant(0))
    with pytest.raises(RuntimeError, match="device lost"):
        step_until_it_fails(loop)
    assert loop.drain(block=True)
    assert slots_out(loop) == 0


def test_a_send_that_fails_ends_the_link_and_keeps_no_slot() -> None:
    loop, link = new_loop(Pages()), RecordingLink()
    link.failure = LinkError("the peer is gone")
    loop.attach(link)
    for seq in range(3):
        loop.accept(grant(seq))
    with pytest.raises(LinkError, match="the peer is gone"):
        step_until_it_fails(loop)
    assert loop.drain(block=True)
    assert slots_out(loop) == 0


@pytest.mark.parametrize("steps", [True, False], ids=["reported", "dead-before"])
def test_a_link_whose_send_failed_frees_its_slots_without_the_garbage_collector(steps: bool) -> None:
    class GoneLink(RecordingLink):
        def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> DoneOp:
            raise LinkError("the peer is gone")

    slots: list[weakref.ref[Slot]] = []

    def seen_slot(nbytes: int) -> Slot:
        slot = new_slot(nbytes)
        slots.append(weakref.ref(slot))
        return slot

    loop = new_loop(Pages(), SlotRing(1, PAGE_NBYTES, seen_slot))
    gc.disable()
    try:
        loop.attach(GoneLink())
        loop.accept(grant(0))
        until(lambda: slots)
        if steps:
            with suppress(LinkError):
                step_until_it_fails(loop)
        assert loop.drain(block=True)
        assert [slot() for slot in slots] == [None]
    finally:
        gc.enable()


def test_a_slot_that_cannot_be_had_ends_the_link() -> None:
    def no_memory(nbytes: int) -> Slot:
        raise LinkError("no shared memory")

    ring = SlotRing(2, PAGE_NBYTES, no_memory)
    loop = new_loop(Pages(), ring)
    loop.attach(RecordingLink())
    loop.accept(grant(0))
    with pytest.raises(LinkError, match="no shared memory"):
        step_until_it_fails(loop)
    assert loop.drain(block=True)


def test_a_grant_for_a_link_that_is_never_built_leaves_nothing_behind() -> None:
    class NeverBuilt:
        def obstacle(self, ours: Place, theirs: Place) -> str | None:
            raise AssertionError("chosen by the test")

        def drive(self, name: str, loop: Stepped) -> Driver:
            raise AssertionError("stepped by the test")

        def new_copier(self, name: str) -> ThreadPoolExecutor:
            raise AssertionError("made by the test")

        def new_slot(self, nbytes: int) -> Slot:
            raise AssertionError("made by the ring")

        def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
            raise LinkError("the peer did not come in time")

    loop, store = new_loop(Pages()), LinkStore(lambda entry, value: None, 1.0)
    worker = LinkWorker(
        spec=LinkSpec(name="l", rank=1, secret=b"", store=store, slot_nbytes=PAGE_NBYTES),
        peer_id="d",
        transport="never",
        loop=loop,
        factory=NeverBuilt(),
        rehearse=None,
        passed_over={},
        clock=time.monotonic,
        report_dead=lambda worker, reason: worker.stop(reason),
        peer_report_s=0.0,
    )
    loop.accept(grant(0))
    while not worker.finished:
        worker.step(block=True)
    assert slots_out(loop) == 0
    assert worker.death == "the peer did not come in time"
