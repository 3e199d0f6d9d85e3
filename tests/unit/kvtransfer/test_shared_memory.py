from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.staging import HEADER_NBYTES
from shared.kvtransfer.transports.shm import SharedSlot, ShmLinkFactory, map_slot
from tests.fake_cuda import is_writable
from tests.patience import PATIENCE_S
from tests.unit.kvtransfer.link_pair import Ends, num_descriptors, num_shared_mappings

torch.set_num_threads(1)
HEADER = bytes(HEADER_NBYTES)
OPTIONS = TransferOptions(op_timeout_s=PATIENCE_S, build_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("writable", [False, True])
def test_a_slot_is_seen_through_its_descriptor(writable: bool) -> None:
    """A GPU node pins what it maps, which not every driver does for memory that cannot be written."""
    slot = SharedSlot(8192)
    seen = map_slot(os.dup(slot.descriptor), writable=writable)
    slot.buffer.copy_(torch.arange(8192) % 251)
    assert torch.equal(seen, slot.buffer)
    assert is_writable(seen.data_ptr()) == writable


def test_a_mapping_lives_as_long_as_its_last_tensor() -> None:
    before = num_shared_mappings()
    slot = SharedSlot(1 << 20)
    part = map_slot(os.dup(slot.descriptor))[5:10]
    slot.buffer.fill_(3)
    del slot
    assert part.tolist() == [3] * 5
    assert num_shared_mappings() == before + 1
    del part
    assert num_shared_mappings() == before


def shm_ends(options: TransferOptions = OPTIONS) -> Ends:
    return Ends(ShmLinkFactory(options, DeviceThreads()), options.num_slots)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = shm_ends()
    yield ends
    ends.close()


def test_a_slot_stays_with_its_send_until_the_receiver_has_released_it(ends: Ends) -> None:
    slot = ends.factory.new_slot(100)
    left: list[int] = []

    def send(seq: int) -> None:
        assert ends.sender.send(slot, 50, seq, bytes([seq] * HEADER_NBYTES)).wait(block=True)
        left.append(seq)

    for seq in range(3):  # the second time without a descriptor
        slot.buffer.fill_(seq + 1)
        arrival = ends.receiver.recv(50, seq)
        sender = threading.Thread(target=send, args=(seq,))
        sender.start()
        assert arrival.wait(block=True)
        assert arrival.header == bytes([seq] * HEADER_NBYTES)
        assert arrival.slot.payload(50).tolist() == [seq + 1] * 50
        sender.join(0.05)
        assert left == list(range(seq))
        arrival.release()
        sender.join(PATIENCE_S)
        assert left == list(range(seq + 1))


def test_what_a_dead_peer_has_sent_is_not_read_from_its_slots(ends: Ends) -> None:
    """Its record is in the socket still. The memory of a GPU process that has died must not be touched."""
    arrival = ends.receiver.recv(50, 0)
    ends.sender.send(ends.factory.new_slot(100), 50, 0, HEADER)
    ends.sender.abort()
    for _ in range(2):
        with pytest.raises(LinkError, match="the peer is gone"):
            arrival.wait(block=True)


def test_a_message_of_another_length_than_was_granted_ends_the_link(ends: Ends) -> None:
    ends.sender.send(ends.factory.new_slot(100), 100, 0, HEADER)
    arrival = ends.receiver.recv(99, 0)
    for _ in range(2):  # asked again, it says so again
        with pytest.raises(LinkError, match=r"100 bytes .* 99 "):
            arrival.wait(block=True)


def test_a_record_that_points_outside_its_slot_ends_the_link(ends: Ends) -> None:
    ends.sender.send(ends.factory.new_slot(100), 1 << 30, 0, HEADER)
    with pytest.raises(LinkError, match=r"slot 0, .* 100 bytes"):
        ends.receiver.recv(1 << 30, 0).wait(block=True)


def test_an_op_times_out_when_the_peer_does_nothing() -> None:
    ends = shm_ends(replace(OPTIONS, op_timeout_s=0.5))
    op = ends.sender.send(ends.factory.new_slot(100), 100, 0, HEADER)
    with pytest.raises(LinkError, match=r"timed out after 0.5 s"):
        op.wait(block=True)
    ends.close()


def test_records_of_another_kind_end_the_link_and_leak_no_descriptor(ends: Ends) -> None:
    """What a peer of another make might do: a descriptor beside a release, and a message of a wrong length."""
    slot = ends.factory.new_slot(100)
    assert isinstance(slot, SharedSlot)
    before = num_descriptors()
    ends.receiver._write(bytes(20), slot.descriptor)  # type: ignore[attr-defined]
    op = ends.sender.send(slot, 100, 0, HEADER)
    with pytest.raises(LinkError, match="malformed"):
        op.wait(block=True)
    arrival = ends.receiver.recv(100, 0)
    assert arrival.wait(block=True)
    assert num_descriptors() == before + 1  # of the mapping
    ends.sender._write(bytes(5), slot.descriptor)  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="malformed"):
        ends.receiver.recv(100, 1).wait(block=True)
    assert num_descriptors() == before + 1
