from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from shared.errors import LinkError
from shared.kvtransfer.link import Arrival, Link, LinkSpec
from shared.kvtransfer.staging import Slot
from shared.protocol.transfer_messages import Grant, GrantedChunk
from tests.patience import until
from tests.unit.kvtransfer.lone_link import (
    KEY,
    PAGE_NBYTES,
    LoneFactory,
    Owner,
    Pages,
    grant,
    new_slot,
    run_to_its_end,
    send_worker,
)
from tests.unit.kvtransfer.looks import slots_out


class DoneOp:
    def wait(self, *, block: bool) -> bool:
        return True


class RecordingLink:
    max_arrivals = 2
    failure: LinkError | None = None

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> DoneOp:
        if self.failure is not None:
            raise LinkError(str(self.failure))
        assert seq == len(self.sent)
        self.sent.append(int(slot.payload(nbytes)[0]))
        return DoneOp()

    def recv(self, nbytes: int, seq: int) -> Arrival:
        raise AssertionError("a sender receives nothing")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_chunks_go_out_in_the_order_of_their_grants_through_fewer_slots() -> None:
    link = RecordingLink()
    worker = send_worker(LoneFactory(link))
    for seq in range(10):  # the peer was faster to build the link
        worker.accept(grant(seq))
    worker.accept(grant(10, num_chunks=10))
    worker.accept(grant(10, num_chunks=10))  # a message that came twice
    while len(link.sent) < 20 or slots_out(worker):
        worker.step(block=True)
    assert link.sent == list(range(20))
    worker.stop("test")
    run_to_its_end(worker)


def test_chunks_are_gathered_and_sent_while_earlier_ones_are_on_their_way() -> None:
    link = RecordingLink()
    worker = send_worker(LoneFactory(link))
    worker.step(block=True)
    for seq in range(3):
        worker.accept(grant(seq))
    until(lambda: link.sent == [0, 1])  # without a step, so no send has been seen to leave its slot
    assert slots_out(worker) == 2
    worker.stop("test")
    run_to_its_end(worker)
    assert slots_out(worker) == 0


def test_a_gather_that_fails_ends_the_link_and_keeps_no_slot() -> None:
    pages = Pages()
    pages.failure = RuntimeError("device lost")
    worker = send_worker(LoneFactory(RecordingLink()), pages)
    worker.accept(grant(0))
    assert run_to_its_end(worker) == "RuntimeError: device lost"
    assert slots_out(worker) == 0


class GpuPages(Pages):
    """Gathers by a GPU, which is done with one when that is waited for. `log` has what was begun and waited for."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.log: list[tuple[str, int]] = []
        self.fails_at = fails_at

    def gather(self, page_ids: Sequence[int], *args: Any) -> Any:
        if page_ids[0] == self.fails_at:
            raise RuntimeError("device lost")
        super().gather(page_ids, *args)
        self.log.append(("begun", page_ids[0]))
        return GpuGather(self.log, page_ids[0])


@dataclass
class GpuGather:
    log: list[tuple[str, int]]
    page: int

    def wait(self) -> int:
        self.log.append(("done", self.page))
        return 0


def test_a_gpu_gathers_the_next_chunk_before_the_one_under_way_is_waited_for() -> None:
    link, pages = RecordingLink(), GpuPages()
    worker = send_worker(LoneFactory(link), pages, num_slots=3)
    worker.accept(grant(0, num_chunks=3))
    worker.step(block=True)
    worker.step(block=True)
    until(lambda: link.sent == [0, 1, 2])
    first, second, third = [[("begun", page), ("done", page)] for page in range(3)]
    assert pages.log == [first[0], second[0], first[1], third[0], second[1], third[1]]
    worker.accept(grant(3))
    while len(link.sent) < 4 or slots_out(worker):  # one alone waits for no other
        worker.step(block=True)
    worker.stop("test")
    run_to_its_end(worker)


@pytest.mark.parametrize("sends", [True, False], ids=["second-gather-fails", "first-send-fails"])
def test_a_gather_under_way_is_waited_for_when_another_chunk_fails(sends: bool) -> None:
    link, pages = RecordingLink(), GpuPages(fails_at=1 if sends else None)
    link.failure = None if sends else LinkError("the peer is gone")
    worker = send_worker(LoneFactory(link), pages, owner := Owner())
    worker.accept(grant(0, num_chunks=2))
    assert run_to_its_end(worker) == ("RuntimeError: device lost" if sends else "the peer is gone")
    begun = [page for what, page in pages.log if what == "begun"]
    assert begun == [page for what, page in pages.log if what == "done"] == ([0] if sends else [0, 1])
    assert not owner.in_use
    assert slots_out(worker) == 0


@pytest.mark.parametrize("steps", [True, False], ids=["reported", "dead-before"])
def test_a_send_that_fails_ends_the_link_and_frees_its_slots_without_the_garbage_collector(
    steps: bool,
) -> None:
    slots: list[weakref.ref[Slot]] = []

    def seen_slot(nbytes: int) -> Slot:
        slot = new_slot(nbytes)
        slots.append(weakref.ref(slot))
        return slot

    link = RecordingLink()
    link.failure = LinkError("the peer is gone")
    worker = send_worker(LoneFactory(link, seen_slot))
    gc.disable()
    try:
        worker.step(block=True)
        for seq in range(3):
            worker.accept(grant(seq))
        until(lambda: slots)
        if not steps:
            worker.stop("dead before")
        assert run_to_its_end(worker) == ("the peer is gone" if steps else "dead before")
        assert slots and not any(slot() for slot in slots)
    finally:
        gc.enable()


def test_a_slot_that_cannot_be_had_ends_the_link() -> None:
    def no_memory(nbytes: int) -> Slot:
        raise LinkError("no shared memory")

    worker = send_worker(LoneFactory(RecordingLink(), no_memory))
    worker.accept(grant(0))
    assert run_to_its_end(worker) == "no shared memory"


def test_a_grant_for_a_link_that_is_never_built_leaves_nothing_behind() -> None:
    class NeverBuilt(LoneFactory):
        def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
            raise LinkError("the peer did not come in time")

    worker = send_worker(NeverBuilt())
    worker.accept(grant(0))
    assert run_to_its_end(worker) == "the peer did not come in time"
    assert slots_out(worker) == 0


@pytest.mark.parametrize(
    ("first_layer", "num_layers", "num_pages", "nbytes"),
    [(-1, 1, 1, 1), (1, 2, 1, 2), (0, 1, 0, 0), (0, 1, 1, 2), (0, 2, 1, 2)],
    ids=["before", "behind", "no page", "other size", "layers of both groups"],
)
def test_a_malformed_grant_is_refused(first_layer: int, num_layers: int, num_pages: int, nbytes: int) -> None:
    worker = send_worker(LoneFactory(RecordingLink()))
    chunk = GrantedChunk(KEY, 0, num_pages, first_layer, num_layers, nbytes * PAGE_NBYTES)
    with pytest.raises(LinkError, match="malformed grant"):
        worker.accept(Grant("l", 0, (chunk,)))
    worker.stop("test")
    run_to_its_end(worker)
