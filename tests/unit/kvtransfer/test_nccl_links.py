"""What is asked of NCCL is data; the logic of its links runs over a fake group, on one CPU.

`test_real_links` runs whole transfers over the same fake.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import RECEIVER, SENDER
from shared.kvtransfer.staging import HEADER_NBYTES, Slot
from shared.kvtransfer.states import ReceiveFailed
from shared.kvtransfer.transports.choice import make_transports
from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory, configure, nccl_environment
from shared.protocol.transfer_messages import Place
from tests.fake_nccl import FakeNccl
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import CPU, Ends, LinkPair, key, over_fake_nccl, real
from tests.unit.kvtransfer.looks import num_slots_out

OPTIONS = TransferOptions(op_timeout_s=PATIENCE_S, build_timeout_s=PATIENCE_S)
HEADER = bytes(range(HEADER_NBYTES))


class Config:
    blocking = -1
    min_ctas = -1
    max_ctas = -1


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = True
        self.config = Config()


def test_options_keep_transfers_small_and_impatient() -> None:
    options = Options()
    configure(options, TransferOptions(op_timeout_s=2.5, nccl_max_ctas=6))
    assert options._timeout == timedelta(seconds=2.5)
    assert not options.is_high_priority_stream
    assert (options.config.blocking, options.config.min_ctas, options.config.max_ctas) == (0, 1, 6)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="THIS BUILD OF TORCH HAS NO NCCL")
def test_torch_has_the_options_that_are_set() -> None:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    configure(options, TransferOptions())
    assert options.config.max_ctas == TransferOptions().nccl_max_ctas
    assert hasattr(ProcessGroupNCCL, "eager_connect_single_device")


def test_the_environment_keeps_the_process_alive() -> None:
    environment = nccl_environment(TransferOptions(build_timeout_s=12.4))
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "12",
    }


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("nccl", "pages are on cpu"),
        ("cuda-ipc", "they are on cpu"),
    ],
)
def test_backends_that_cannot_work_are_refused(backend: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_transports(TransferOptions(backend=backend), CPU)


def nccl_ends(nccl: FakeNccl, options: TransferOptions = OPTIONS) -> Ends:
    return Ends(NcclLinkFactory(options, CPU, nccl.new_group, DeviceThreads()), options.num_slots)


@pytest.fixture
def nccl() -> FakeNccl:
    return FakeNccl()


@pytest.fixture
def ends(nccl: FakeNccl) -> Iterator[Ends]:
    ends = nccl_ends(nccl)
    yield ends
    ends.close()


def test_a_payload_waits_for_its_header(ends: Ends) -> None:
    ends.holds_headers = True
    slot, arrival = ends.factory.new_slot(4096), ends.receiver.recv(100, 0)
    slot.buffer.fill_(7)
    assert ends.sender.send(slot, 100, 0, HEADER).wait(block=True)
    (late,) = ends.headers
    threading.Timer(0.05, ends.stores[RECEIVER].feed, late).start()
    assert arrival.wait(block=True)
    assert arrival.header == HEADER
    assert arrival.slot.payload(100).tolist() == [7] * 100
    arrival.release()


def test_headers_that_come_before_their_payloads_find_them(ends: Ends, nccl: FakeNccl) -> None:
    nccl.hold()
    slots = [ends.factory.new_slot(4096) for _ in range(3)]
    arrivals = [ends.receiver.recv(100, seq) for seq in range(3)]
    for seq, slot in enumerate(slots):
        slot.buffer.fill_(seq)
        ends.sender.send(slot, 100, seq, bytes([seq] * HEADER_NBYTES))
    assert not arrivals[0].wait(block=False)
    nccl.release()
    for seq, arrival in enumerate(arrivals):
        assert arrival.wait(block=True)
        assert arrival.header == bytes([seq] * HEADER_NBYTES)
        assert arrival.slot.payload(100).tolist() == [seq] * 100
        arrival.release()


def test_an_op_whose_time_is_over_has_let_go_of_its_slot(nccl: FakeNccl) -> None:
    """NCCL's kernels have no timeout that ends them, so the op aborts the group before it says that it has failed."""
    ends = nccl_ends(nccl, replace(OPTIONS, op_timeout_s=0.2))
    nccl.hold()
    arrival = ends.receiver.recv(100, 0)
    assert nccl.scribble() == 1
    for _ in range(2):  # asked again, it says so again
        with pytest.raises(LinkError, match=r"timed out after 0.2 s"):
            arrival.wait(block=True)
    assert nccl.scribble() == 0, "nothing writes to the slot any more"
    arrival.release()
    with pytest.raises(LinkError):
        ends.receiver.recv(100, 1)
    ends.close()


def test_a_message_whose_header_never_comes_fails(nccl: FakeNccl) -> None:
    ends = nccl_ends(nccl, replace(OPTIONS, op_timeout_s=0.2))
    ends.holds_headers = True
    arrival = ends.receiver.recv(100, 0)
    ends.sender.send(ends.factory.new_slot(4096), 100, 0, HEADER)
    with pytest.raises(LinkError, match="did not set"):
        arrival.wait(block=True)
    arrival.release()
    ends.close()


def test_building_that_hangs_is_aborted(nccl: FakeNccl) -> None:
    nccl.connect_hangs = True
    ends = nccl_ends(nccl, replace(OPTIONS, build_timeout_s=0.3))
    assert len(ends.failures) == 2 and "aborted" in ends.failures[SENDER]
    assert sorted(nccl.events) == ["abort 0", "abort 1"]


def test_memory_of_a_dead_link_is_freed_after_its_abort(nccl: FakeNccl) -> None:
    """A kernel of the dead link writes to its slot until the group is aborted."""

    def watched(rank: int) -> NcclLinkFactory:
        class WatchedFactory(NcclLinkFactory):
            def new_slot(self, nbytes: int) -> Slot:
                slot = super().new_slot(nbytes)
                weakref.finalize(slot, nccl.events.append, f"free {rank}")
                return slot

        return WatchedFactory(options, CPU, nccl.new_group, DeviceThreads())

    options = real("nccl")
    honest = over_fake_nccl(options, nccl)
    pair = LinkPair(
        options,
        p_transports=replace(honest, factories={"nccl": watched(SENDER)}),
        d_transports=replace(honest, factories={"nccl": watched(RECEIVER)}, place=Place("d", "GPU-1")),
    )
    pair.until(pair.linked)
    nccl.hold()
    pair.transfer(0, list(range(1, 60)), list(range(1, 60)))
    until(lambda: num_slots_out(pair.p) > 0 and num_slots_out(pair.d) > 0)
    nccl.events.clear()
    pair.p.on_disconnected("d0", "killed")
    pair.d.end_link_of("p0", "killed")
    pair.until(lambda: key(0) in pair.received)
    assert isinstance(pair.received[key(0)], ReceiveFailed)
    until(lambda: num_slots_out(pair.p) == num_slots_out(pair.d) == 0)
    for rank in (SENDER, RECEIVER):
        until(lambda rank=rank: f"free {rank}" in nccl.events)
        assert nccl.events.index(f"abort {rank}") < nccl.events.index(f"free {rank}")
    nccl.release()
    pair.close()
