from __future__ import annotations

import pytest
import torch

from shared.errors import LinkError
from shared.kvtransfer.staging import HEADER_NBYTES, Chunk, Envelope, Slot, SlotRing
from shared.kvtransfer.transports.common import HeadedSlot
from shared.protocol.messages import ReqKey

ENVELOPE = Envelope(ReqKey("router", "a", 0), Chunk(3, 2, 0, 4), 17)
OTHERS = [
    Envelope(ReqKey("router", "a", 1), ENVELOPE.chunk, 17),
    Envelope(ENVELOPE.key, Chunk(3, 2, 0, 3), 17),
    Envelope(ENVELOPE.key, Chunk(4, 2, 0, 4), 17),
    Envelope(ENVELOPE.key, ENVELOPE.chunk, 18),
]
DIGEST = 2**64 - 3


def sealed(*, void: bool = False) -> bytes:
    return ENVELOPE.seal(None if void else DIGEST)


def test_a_sealed_chunk_opens_with_its_digest() -> None:
    assert len(sealed()) == HEADER_NBYTES
    assert ENVELOPE.open(sealed()) == DIGEST


def test_a_void_chunk_has_none() -> None:
    assert len(sealed(void=True)) == HEADER_NBYTES
    assert ENVELOPE.open(sealed(void=True)) is None


@pytest.mark.parametrize("void", [False, True])
def test_any_flipped_bit_of_the_header_shows(void: bool) -> None:
    """In the digest of pages it shows when these have been scattered, elsewhere at once."""
    for bit in range(8 * HEADER_NBYTES):
        header = bytearray(sealed(void=void))
        header[bit // 8] ^= 1 << bit % 8
        if void or bit // 8 < HEADER_NBYTES - 8:
            with pytest.raises(LinkError):
                ENVELOPE.open(bytes(header))
        else:
            assert ENVELOPE.open(bytes(header)) not in (DIGEST, None)


@pytest.mark.parametrize("other", OTHERS)
def test_another_chunk_than_the_granted_one_is_an_error_of_the_link(other: Envelope) -> None:
    with pytest.raises(LinkError, match="granted"):
        other.open(sealed())


def test_every_field_of_the_header_seeds_the_digest() -> None:
    assert len({envelope.seed for envelope in (ENVELOPE, *OTHERS)}) == 1 + len(OTHERS)


def test_a_slot_is_seen_at_the_length_that_is_asked_for() -> None:
    slot = Slot(torch.arange(256).to(torch.uint8))
    for nbytes in (100, 200, 200, 0, 100):
        assert slot.payload(nbytes).tolist() == list(range(nbytes))


def test_a_header_and_a_payload_are_one_message_of_gloo() -> None:
    slot = HeadedSlot(torch.zeros(HEADER_NBYTES + 256, dtype=torch.uint8))
    slot.payload(96).fill_(7)
    slot.header = sealed()
    assert slot.header == sealed()
    for nbytes in (96, 8, 96):
        assert bytes(slot.message(nbytes).numpy()) == sealed() + bytes([7] * nbytes)
    assert slot.payload(96).view(torch.int64).numel() == 12, "it is aligned for any element"


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
    assert made == [1000, 1000]
    ring.close()
    assert ring.take() is None  # of a link that is gone
