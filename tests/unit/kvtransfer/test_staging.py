from __future__ import annotations

import pytest
import torch

from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.staging import HEADER_NBYTES, Envelope, Slot, SlotRing
from shared.protocol.messages import ReqKey

ENVELOPE = Envelope(ReqKey("router", "a", 0), Chunk(3, 2, 0, 4), 17)
OTHERS = [
    Envelope(ReqKey("router", "a", 1), ENVELOPE.chunk, 17),
    Envelope(ENVELOPE.key, Chunk(3, 2, 0, 3), 17),
    Envelope(ENVELOPE.key, Chunk(4, 2, 0, 4), 17),
    Envelope(ENVELOPE.key, ENVELOPE.chunk, 18),
]
DIGEST = 2**64 - 3


def sealed(*, void: bool = False) -> Slot:
    slot = Slot(torch.zeros(256, dtype=torch.uint8))
    slot.seal(ENVELOPE, None if void else DIGEST)
    return slot


def test_a_sealed_chunk_opens_with_its_digest() -> None:
    assert sealed().open(ENVELOPE) == DIGEST


def test_a_void_chunk_has_none() -> None:
    assert sealed(void=True).open(ENVELOPE) is None


@pytest.mark.parametrize("void", [False, True])
def test_any_flipped_bit_of_the_header_shows(void: bool) -> None:
    """In the digest of pages it shows when these have been scattered, elsewhere at once."""
    for bit in range(8 * HEADER_NBYTES):
        slot = sealed(void=void)
        slot.buffer[bit // 8] ^= 1 << bit % 8
        if void or bit // 8 < HEADER_NBYTES - 8:
            with pytest.raises(LinkError):
                slot.open(ENVELOPE)
        else:
            assert slot.open(ENVELOPE) not in (DIGEST, None)


@pytest.mark.parametrize("other", OTHERS)
def test_another_chunk_than_the_granted_one_is_an_error_of_the_link(other: Envelope) -> None:
    with pytest.raises(LinkError, match="not the chunk that was granted"):
        sealed().open(other)


def test_every_field_of_the_header_seeds_the_digest() -> None:
    assert len({envelope.seed for envelope in (ENVELOPE, *OTHERS)}) == 1 + len(OTHERS)


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
