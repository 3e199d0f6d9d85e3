"""A GPU in one thread of the host: kernels are recorded per stream, and run as late as events allow, or earlier.

    gpu = FakeGpu(Schedule(seed=1, eagerness=(0.0, 0.5)))
    with FakeTorch(gpu):  # tensors of DEVICE are recorded, not computed
        CudaForwardStream(runner, host_pool, streams=gpu)

What a stream runs, it runs in order; two streams are ordered by events alone. Two things make the device run: a call
of the host lets each stream run ahead by chance (`Schedule.eagerness`), and a wait of the host runs what it waits for
and nothing else. So a stream of eagerness 0 is as late as it may be while others are early. While one thread of the
host waits, `on_wait` lets other threads of the host go on.

An effect that no order allows is a race, and is noted in `races`: a kernel that uses freed memory, or one that fails.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shared.device_streams import StreamEvent

GARBAGE = 0x5B
"""Every byte of memory that was allocated or freed and not written since."""


@dataclass(frozen=True)
class Schedule:
    """When a device runs what it may run: drawn by hypothesis, which shrinks it towards "everything late"."""

    seed: int = 0
    eagerness: tuple[float, ...] = ()
    """Of each stream in the order of their making, repeated: the chance that it runs on at a call of the host."""
    interrupts: float = 0.0
    """The chance that other threads of the host go on while one waits."""


@dataclass(eq=False)
class Memory:
    """One allocation, as kernels know it: by its address, which does not keep it allocated."""

    tensor: torch.Tensor
    is_given_back: bool = False
    """The host has let go of it."""
    is_freed: bool = False
    """So has the stream of its allocation: what ran there before is done."""
    check_writes: Callable[[torch.Tensor], None] | None = None
    """Told which elements a kernel has changed. Raises AssertionError for what may not be written now."""

    def fill_with_garbage(self) -> None:
        self.tensor.view(-1).view(torch.uint8).fill_(GARBAGE)


@dataclass(eq=False)
class Kernel:
    """Work on a stream. `run` is called once `needs` has been passed."""

    name: str
    run: Callable[[], None]
    uses: tuple[Memory, ...] = ()
    needs: FakeEvent | None = None


@dataclass(eq=False)
class FakeEvent:
    """A point on a stream."""

    stream: FakeStream
    is_passed: bool = False

    def synchronize(self) -> None:
        self.stream.gpu.wait_for(self)

    def seconds_since(self, earlier: StreamEvent) -> float:
        assert isinstance(earlier, FakeEvent)
        assert self.is_passed and earlier.is_passed, "an event that was not passed has no time"
        return 0.001


@dataclass(eq=False)
class FakeStream:
    """A queue of kernels."""

    gpu: FakeGpu
    name: str
    queue: deque[Kernel] = field(default_factory=deque)

    @contextmanager
    def use(self) -> Iterator[None]:
        self.gpu.current_streams.append(self)
        try:
            yield
        finally:
            assert self.gpu.current_streams.pop() is self

    def record(self, *, timed: bool = False) -> FakeEvent:
        event = FakeEvent(self)

        def passed() -> None:
            event.is_passed = True

        self.push(Kernel("event", passed))
        return event

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        self.push(Kernel("wait", lambda: None, needs=event))

    def synchronize(self) -> None:
        self.record().synchronize()

    def push(self, kernel: Kernel) -> None:
        self.queue.append(kernel)
        self.gpu.run_ahead()

    @property
    def may_run(self) -> bool:
        """Whether the next kernel may run now."""
        return bool(self.queue) and (self.queue[0].needs is None or self.queue[0].needs.is_passed)

    def run_one(self) -> None:
        kernel = self.queue.popleft()
        before = [
            (memory, memory.tensor.clone()) for memory in kernel.uses if memory.check_writes is not None
        ]
        try:
            for memory in kernel.uses:
                assert not memory.is_freed, "it uses memory that was freed"
            kernel.run()
            for memory, content in before:
                assert memory.check_writes is not None
                memory.check_writes(content != memory.tensor)
        except (
            IndexError,
            RuntimeError,
            AssertionError,
        ) as error:  # on a GPU an illegal address, or nothing at all
            self.gpu.found(f"{kernel.name} on stream {self.name}: {error}")


class FakeGpu:
    """One device of one process. It is a `DeviceStreams`."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self.races: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.num_allocations_left: int | None = None
        """Before one of them fails, and the count ends; None: all succeed."""
        self.num_kernels = 0
        self._random = random.Random(self.schedule.seed)
        self._streams: list[FakeStream] = []
        self._is_closed = False
        self.default = self._new("default")
        self.current_streams = [self.default]

    # ------------------------------------------------------------------------------------- DeviceStreams
    def new(self) -> FakeStream:
        return self._new(f"{len(self._streams)}")

    def current(self) -> FakeStream:
        return self.current_streams[-1]

    def _new(self, name: str) -> FakeStream:
        stream = FakeStream(self, name)
        self._streams.append(stream)
        return stream

    def start_copy(self, to: torch.Tensor, source: torch.Tensor) -> FakeEvent:
        """The `StartCopy` of this device."""
        to.copy_(source, non_blocking=True)
        return self.current().record()

    # ------------------------------------------------------------------------------------------- memory
    def allocate(self, tensor: torch.Tensor) -> Block:
        """Memory from the allocator of the current stream. Its last owner's kernels on that stream may still run."""
        if self.num_allocations_left is not None:
            self.num_allocations_left -= 1
            if self.num_allocations_left < 0:
                self.num_allocations_left = None
                raise torch.OutOfMemoryError("the fake GPU was told to have no memory left")
        memory = Memory(tensor)
        self.launch("the last owner's write", memory.fill_with_garbage, (memory,))
        return Block(self, memory, self.current())

    def freed(self, memory: Memory, stream: FakeStream) -> None:
        """The host has let go of it. The next owner's kernels on `stream` may be queued from now on."""
        memory.is_given_back = True
        if not self._is_closed:

            def reuse() -> None:
                memory.is_freed = True
                memory.fill_with_garbage()

            stream.push(Kernel("reuse", reuse))

    # -------------------------------------------------------------------------------------------- running
    def launch(self, name: str, run: Callable[[], None], uses: tuple[Memory, ...]) -> None:
        """Queue a kernel on the current stream."""
        self.num_kernels += 1
        self.current().push(Kernel(name, run, uses))

    def run_ahead(self) -> None:
        """Let each stream run what it may, as far as its eagerness goes."""
        for stream in self._streams:
            while stream.may_run and self._random.random() < self._eagerness(stream):
                stream.run_one()

    def wait_for(self, event: FakeEvent) -> None:
        """Block a thread of the host until `event` has been passed."""
        while not event.is_passed:
            if self._random.random() < self.schedule.interrupts:
                with self.default.use():  # another thread of the host
                    self.on_wait()
            if not event.is_passed:
                self._run_towards(event)

    @property
    def queued(self) -> list[str]:
        """What is still to run, but for the next owner's writes to memory that was freed."""
        return [kernel.name for stream in self._streams for kernel in stream.queue if kernel.name != "reuse"]

    def synchronize(self) -> None:
        """Run everything that is queued, in any order that is allowed."""
        while any(stream.queue for stream in self._streams):
            stream = self._random.choice([stream for stream in self._streams if stream.may_run])
            stream.run_one()

    def close(self) -> None:
        """What is freed from now on stays as it is."""
        self._is_closed = True

    def found(self, race: str) -> None:
        """Note a race."""
        self.races.append(race)

    def _run_towards(self, event: FakeEvent) -> None:
        stream = event.stream
        while not stream.may_run:
            assert stream.queue, "an event was never recorded"
            needed = stream.queue[0].needs
            assert needed is not None
            stream = needed.stream
        stream.run_one()

    def _eagerness(self, stream: FakeStream) -> float:
        each = self.schedule.eagerness
        return each[self._streams.index(stream) % len(each)] if each else 0.0


class Block:
    """What tensors of the device own together. The memory is freed when the last of them is gone."""

    def __init__(self, gpu: FakeGpu, memory: Memory, stream: FakeStream) -> None:
        self.gpu = gpu
        self.memory = memory
        self._stream = stream

    def __del__(self) -> None:
        self.gpu.freed(self.memory, self._stream)
