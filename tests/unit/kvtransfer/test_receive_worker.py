"""The order in which a receiving node grants chunks over one link."""

from __future__ import annotations

import pytest
import torch

from shared.kvtransfer.staging import Chunk, Envelope, Slot
from shared.protocol.messages import ReqKey
from tests.unit.kvtransfer.lone_link import LoneFactory, Owner, receive_worker

MOVING, WAITING = ReqKey("router", "moving", 1), ReqKey("router", "waiting", 0)


class SealedArrival:
    """A chunk that arrives when the test says so."""

    header = b""

    def __init__(self, nbytes: int) -> None:
        self.slot = Slot(torch.zeros(nbytes, dtype=torch.uint8))
        self.is_here = False

    def wait(self, *, block: bool) -> bool:
        return self.is_here

    def release(self) -> None:
        pass


class RecordingLink:
    max_arrivals = 4

    def __init__(self) -> None:
        self.arrivals: list[SealedArrival] = []

    def recv(self, nbytes: int, seq: int) -> SealedArrival:
        assert seq == len(self.arrivals)
        self.arrivals.append(SealedArrival(nbytes))
        return self.arrivals[-1]


class Rig:
    def __init__(self, **own: object) -> None:
        self.owner, self.link = Owner(), RecordingLink()
        self.granted = self.owner.granted
        self.worker = receive_worker(LoneFactory(self.link), self.owner, **own)
        self.worker.step(block=False)

    def offer(self, key: ReqKey, *pages: int, bulk: bool = False) -> None:
        self.worker.enqueue(key, [Chunk(page, 1, 0, 1) for page in pages], bulk=bulk)

    def arrive(self) -> None:
        """Let all that was granted arrive."""
        for seq, arrival in enumerate(self.link.arrivals):
            if not arrival.is_here:
                key, page = self.granted[seq]
                envelope = Envelope(key, Chunk(page, 1, 0, 1), seq)
                arrival.header = envelope.seal(0)
                arrival.is_here = True
        while self.worker.step(block=False):
            pass


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_bulk_chunks_come_after_all_others_of_their_link(rig: Rig) -> None:
    rig.offer(MOVING, 0, 1, 2, bulk=True)
    rig.offer(WAITING, 0, 1)
    rig.worker.step(block=False)
    assert rig.granted == [(WAITING, 0), (WAITING, 1), (MOVING, 0), (MOVING, 1)]


def test_chunks_of_a_request_that_has_stopped_are_bulk_no_longer(rig: Rig) -> None:
    other = ReqKey("router", "other", 1)
    rig.offer(other, 0, 1, bulk=True)
    rig.offer(MOVING, 0, 1, bulk=True)
    rig.worker.hurry(MOVING)
    rig.worker.step(block=False)
    rig.arrive()
    assert rig.granted == [(MOVING, 0), (MOVING, 1), (other, 0), (other, 1)]


def test_a_link_carries_when_its_first_chunk_has_arrived(rig: Rig) -> None:
    assert rig.worker.carries is None
    rig.offer(WAITING, 0)
    rig.worker.step(block=False)
    assert rig.worker.carries is False, "such a link gives way to the next transport"
    rig.arrive()
    assert rig.worker.carries is True


def test_bulk_chunks_go_one_by_one_while_others_are_on_their_way_over_another_link(rig: Rig) -> None:
    rig.owner.hurried = True
    rig.offer(MOVING, *range(6), bulk=True)
    rig.worker.step(block=False)
    assert rig.granted == [(MOVING, 0)]
    rig.arrive()
    assert rig.granted == [(MOVING, 0), (MOVING, 1)]
    rig.owner.hurried = False
    rig.arrive()
    assert rig.granted == [(MOVING, page) for page in range(5)], "four on their way at a time"
