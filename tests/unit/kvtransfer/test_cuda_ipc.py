"""What links over CUDA IPC do beyond those of shared memory, over a fake of the CUDA runtime.

`test_real_links` runs whole transfers over the same fake.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.staging import HEADER_NBYTES, Slot
from shared.kvtransfer.transports.cuda.cuda_ipc import IpcSharing, IpcSlot
from shared.kvtransfer.transports.shm import ShmLinkFactory
from tests.fake_cuda import FakeRuntime
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import (
    LinkPair,
    num_descriptors,
    over_fake_cuda,
    real,
)
from tests.unit.kvtransfer.looks import transports_of

HEADER = bytes(HEADER_NBYTES)


class Sharing:
    """A slot of one runtime that another one sees."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.at_p, self.at_d = FakeRuntime(), FakeRuntime()
        threads = DeviceThreads()
        self.sender = IpcSharing(self.at_p, timeout_s, threads)
        self.receiver = IpcSharing(self.at_d, timeout_s, threads)
        self.slot: IpcSlot | None = IpcSlot(self.at_p, 4096)

    def show(self) -> Slot:
        assert self.slot is not None
        shown, witness = self.sender.show(self.slot)
        return self.receiver.see(shown, os.dup(witness))  # as a socket passes it

    def drop(self) -> None:
        """The ring of a link lets go of its slots before the link is closed."""
        self.slot = None


@pytest.fixture
def sharing() -> Iterator[Sharing]:
    before = num_descriptors()
    sharing = Sharing()
    yield sharing
    sharing.drop()
    sharing.receiver.close()
    sharing.sender.close()
    assert sharing.at_p.num_areas == sharing.at_d.num_areas == 0
    until(lambda: num_descriptors() <= before)


def test_small_slots_are_seen_as_what_they_are(sharing: Sharing) -> None:
    """cudaMalloc puts small blocks into one allocation, and a handle maps all of it, from its first byte on."""
    slots = [IpcSlot(sharing.at_p, 4096) for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.buffer.fill_(number + 1)
    seen = []
    for slot in slots:
        shown, witness = sharing.sender.show(slot)
        seen.append(sharing.receiver.see(shown, os.dup(witness)))
    assert [one.payload(4096).unique().tolist() for one in seen] == [[1], [2], [3]]


def test_a_slot_is_freed_when_its_reader_has_unmapped_it(sharing: Sharing) -> None:
    sharing.show()
    sharing.drop()
    closing = threading.Thread(target=sharing.sender.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and sharing.at_p.num_areas == 1
    sharing.receiver.close()
    closing.join(PATIENCE_S)
    assert sharing.at_p.num_areas == sharing.at_d.num_areas == 0


def test_slots_of_a_stopped_reader_outlive_their_link_and_are_freed_when_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sharing = Sharing(timeout_s=0.05)
    sharing.show()
    sharing.drop()
    sharing.sender.close()
    assert "kv_slots_held_by_peer" in caplog.text
    assert sharing.at_p.num_areas == 1
    sharing.receiver.close()
    until(lambda: sharing.at_p.num_areas == 0)


def test_a_witness_that_was_passed_on_is_held_by_the_peer_alone(sharing: Sharing) -> None:
    slot = sharing.slot
    assert slot is not None
    _, witness = sharing.sender.show(slot)
    pipe = os.readlink(f"/proc/self/fd/{witness}")

    def num_ends() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{n}").endswith(pipe) for n in os.listdir("/proc/self/fd"))

    assert num_ends() == 2
    sharing.sender.show(IpcSlot(sharing.at_p, 4096))
    assert num_ends() == 1, "the next slot is shown when the record of the one before has been sent"


def test_a_slot_that_was_never_sent_is_freed_with_its_ring(sharing: Sharing) -> None:
    assert sharing.at_p.num_areas == 1
    sharing.drop()
    assert sharing.at_p.num_areas == 0


@pytest.mark.parametrize("shown", [b"", b"\x93\x01", bytes(200)])
def test_what_no_slot_is_shown_as_ends_the_link_and_leaks_no_descriptor(
    sharing: Sharing, shown: bytes
) -> None:
    read, write = os.pipe()
    with pytest.raises(LinkError, match="cannot be mapped"):
        sharing.receiver.see(shown, write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)
    os.close(read)


class Refusing(FakeRuntime):
    """Maps memory that torch does not take."""

    def open(self, handle: bytes) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid argument")


def test_a_slot_that_torch_does_not_take_is_let_go_of(sharing: Sharing) -> None:
    sharing.receiver = IpcSharing(Refusing(), PATIENCE_S, DeviceThreads())
    with pytest.raises(LinkError, match="cannot be mapped: CUDA error"):
        sharing.show()
    sharing.drop()
    sharing.sender.close()
    assert sharing.at_p.num_areas == 0, "the sender has seen that its witness is closed"


def test_a_container_that_forbids_ipc_gives_way_to_shm() -> None:
    options = replace(real("auto"), slot_nbytes=256 << 10)
    both = []
    for runtime in (FakeRuntime(), FakeRuntime(without_ipc=True)):
        ipc = over_fake_cuda(options, runtime)
        factories = {**ipc.factories, "shm": ShmLinkFactory(options, DeviceThreads(), runtime)}
        both.append((runtime, replace(ipc, factories=factories)))
    (p_runtime, p), (d_runtime, d) = both
    with closing(LinkPair(options, p_transports=p, d_transports=d)) as pair:
        pair.transfer(0, [1], [2])
        pair.until_received(0)
        pair.until(lambda: transports_of(pair.p) == transports_of(pair.d) == ["shm"])
        (report,) = pair.d.link_reports
        assert "cudaIpcOpenMemHandle" in report.passed_over["cuda-ipc"]
        pair.moves_pages(1)
        assert len(p_runtime.registered) == len(d_runtime.registered) > 0, (
            "shm's slots are pinned at both ends"
        )
    until(lambda: not p_runtime.registered and not d_runtime.registered)
    until(lambda: p_runtime.num_areas == d_runtime.num_areas == 0)


AT_EXIT = """
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.kvtransfer.transports.cuda.cuda_ipc import IpcSlot
from shared.kvtransfer.transports.shm import ShmLinkFactory
from tests.fake_cuda import FakeRuntime

class Runtime(FakeRuntime):
    def free(self, address):
        print("freed")

    def unregister(self, memory):
        print("unregistered")

runtime = Runtime()
shm = ShmLinkFactory(TransferOptions(), DeviceThreads(), runtime)
dropped, kept = ([IpcSlot(runtime, 4096), shm.new_slot(4096)] for _ in range(2))
dropped.clear()
print("exit")
"""


def test_a_process_that_ends_leaves_its_slots_to_the_driver() -> None:
    """Which may have shut down before finalizers run."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["exit", "freed", "unregistered"], done.stderr
