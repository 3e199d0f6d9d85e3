"""Blocks of host values on their way to the device: what a copy waits for, and what arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shared.engine.uploads import BlockRing, Uploads

CPU = torch.device("cpu")


@dataclass
class Stream:
    """Copies that run when a test says so, or when they are waited for."""

    queued: list[Copy] = field(default_factory=list)
    num_waits: int = 0
    """Waits for a copy that had not run."""

    def start_copy(self, to: torch.Tensor, source: torch.Tensor) -> Copy:
        self.queued.append(Copy(self, to, source))
        return self.queued[-1]

    def run_one(self) -> None:
        copy = self.queued.pop(0)
        copy.to.copy_(copy.source)
        copy.is_done = True


@dataclass(eq=False)
class Copy:
    stream: Stream
    to: torch.Tensor
    source: torch.Tensor
    is_done: bool = False

    def synchronize(self) -> None:
        self.stream.num_waits += not self.is_done
        while not self.is_done:
            self.stream.run_one()


def test_with_one_forward_in_flight_nothing_waits() -> None:
    """The copy of a forward is done when its result is seen, which is before the next but one is launched."""
    stream = Stream()
    ring = BlockRing(32, CPU, stream.start_copy)
    for step in range(6):
        ring.fill()[:] = step
        ring.send(32)
        if step:
            stream.run_one()  # up to here the device has come when the scheduler sees forward step - 1
            assert set(ring.on_device.tolist()) == {step - 1}
    assert stream.num_waits == 0


def test_a_block_is_not_filled_again_before_its_copy_is_done() -> None:
    stream = Stream()
    ring = BlockRing(32, CPU, stream.start_copy)
    for step in range(3):
        ring.fill()[:] = step
        ring.send(32)
    assert stream.num_waits == 1
    assert set(ring.on_device.tolist()) == {0}


def test_only_what_was_filled_is_copied() -> None:
    stream = Stream()
    ring = BlockRing(64, CPU, stream.start_copy)
    ring.fill()[:] = 1
    ring.send(20)
    assert stream.queued[0].source.nbytes == 20


ARRAYS = [
    np.array([1, 2, 3]),
    np.array([[4, 5]], dtype=np.int32),
    np.empty((2, 0), dtype=np.int64),
    np.array([0.5], dtype=np.float32),
    np.array([[0.25, 0.75]]).T,
]


def test_arrays_arrive_as_they_were() -> None:
    stream = Stream()
    uploads = Uploads(CPU, stream.start_copy)
    for _ in range(2):
        tensors = uploads.send(ARRAYS)
        assert len(stream.queued) == 1, "one copy brings all of them"
        while stream.queued:
            stream.run_one()
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.data_ptr() % 16 == 0


def test_blocks_grow_to_what_is_needed_and_what_was_sent_before_still_arrives() -> None:
    stream = Stream()
    uploads = Uploads(CPU, stream.start_copy)
    (small,) = uploads.send([np.arange(3)])
    (large,) = uploads.send([np.arange(100_000)])
    while stream.queued:
        stream.run_one()
    assert small.tolist() == [0, 1, 2]
    assert torch.equal(large, torch.arange(100_000))


def test_nothing_is_sent_where_nothing_was_asked_for() -> None:
    stream = Stream()
    assert Uploads(CPU, stream.start_copy).send([]) == []
    assert not stream.queued
