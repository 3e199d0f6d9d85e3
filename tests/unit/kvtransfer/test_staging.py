from __future__ import annotations

import pytest
import torch

from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.staging import HEADER_NBYTES, Envelope, Flag, Slot, SlotRing
from shared.protocol.messages import ReqKey

ENVELOPE = Envelope(ReqKey("router", "a", 0), Chunk(3, 2, 0, 4), 17)
NBYTES = HEADER_NBYTES + 100


def sealed(*, void: bool = False, digested: bool = True) -> Slot:
    slot = Slot(torch.zeros(256, dtype=torch.uint8), digested=digested)
    slot.payload(NBYTES).copy_(torch.arange(100, dtype=torch.uint8))
    slot.seal(ENVELOPE, NBYTES, void=void)
    return slot


def test_a_sealed_chunk_opens_intact() -> None:
    slot = sealed()
    assert slot.open(ENVELOPE, NBYTES) == (Flag.CHECKED, True)
    assert torch.equal(slot.payload(NBYTES), torch.arange(100, dtype=torch.uint8))


def test_a_void_chunk_says_so() -> None:
    assert sealed(void=True).open(ENVELOPE, NBYTES) == (Flag.VOID, True)


def test_without_a_digest_only_the_header_is_checked() -> None:
    slot = sealed(digested=False)
    slot.payload(NBYTES)[7] ^= 1
    assert slot.open(ENVELOPE, NBYTES) == (Flag.UNCHECKED, True)
    slot.buffer[8] ^= 1
    with pytest.raises(LinkError):
        slot.open(ENVELOPE, NBYTES)


@pytest.mark.parametrize("at", [0, 1, 63, 99])
def test_any_damaged_byte_of_the_payload_shows(at: int) -> None:
    slot = sealed()
    slot.payload(NBYTES)[at] ^= 1
    assert slot.open(ENVELOPE, NBYTES) == (Flag.CHECKED, False)


def test_any_damaged_byte_of_the_header_shows() -> None:
    for at in range(HEADER_NBYTES):
        slot = sealed()
        slot.buffer[at] ^= 1
        if at < HEADER_NBYTES - 8:
            with pytest.raises(LinkError):
                slot.open(ENVELOPE, NBYTES)
        else:
            assert slot.open(ENVELOPE, NBYTES) == (Flag.CHECKED, False)


@pytest.mark.parametrize(
    "other",
    [
        Envelope(ReqKey("router", "a", 1), ENVELOPE.chunk, 17),
        Envelope(ENVELOPE.key, Chunk(3, 2, 0, 3), 17),
        Envelope(ENVELOPE.key, Chunk(4, 2, 0, 4), 17),
        Envelope(ENVELOPE.key, ENVELOPE.chunk, 18),
    ],
)
def test_another_chunk_than_the_granted_one_is_an_error_of_the_link(other: Envelope) -> None:
    with pytest.raises(LinkError, match="not the chunk that was granted"):
        sealed().open(other, NBYTES)


def test_a_slot_is_seen_at_the_length_that_is_asked_for() -> None:
    slot = Slot(torch.arange(256).to(torch.uint8))
    for nbytes in (100, 200, 200, HEADER_NBYTES, 100):
        assert slot.message(nbytes).tolist() == list(range(nbytes))
        assert slot.payload(nbytes).tolist() == list(range(HEADER_NBYTES, nbytes))


def test_the_payload_is_aligned_for_any_element() -> None:
    slot = sealed()
    assert slot.payload(HEADER_NBYTES + 96).view(torch.int64).numel() == 12


def test_a_ring_hands_out_each_slot_once() -> None:
    made: list[int] = []

    def new_slot(nbytes: int) -> Slot:
        made.append(nbytes)
        return Slot(torch.zeros(nbytes, dtype=torch.uint8))

    ring = SlotRing(2, 1000, new_slot)
    assert made == []  # memory is taken on first use, on the thread that uses it
    first, second = ring.take(), ring.take()
    assert first is not None
    assert second is not None
    assert first is not second
    assert ring.take() is None
    assert ring.num_out == 2
    ring.give_back(first)
    assert ring.take() is first
    ring.give_back(first)
    ring.give_back(second)
    assert ring.take() is second  # the last to come home
    ring.give_back(second)
    assert ring.num_out == 0
    assert made == [1064, 1064]
    ring.close()
    assert ring.take() is None  # of a link that is gone
