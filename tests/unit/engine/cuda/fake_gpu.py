"""A GPU that is nothing but numbers: processes that take its memory, and a model that needs some."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.engine.device_share import BoundModel
from shared.engine.engine_shape import EngineShape
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kvcache.page_mover import TorchPageMover
from shared.kvcache.pools import TokenToKVPool
from shared.protocol.logprobs import Logprobs
from shared.scheduling.commit import Sampled


@dataclass
class FakeGpu:
    total: int
    taken: dict[str, int] = field(default_factory=dict)
    """By process."""

    @property
    def free(self) -> int:
        return self.total - sum(self.taken.values())


class FakeMemory:
    """A DeviceMemory: the allocator of one process, which keeps what was freed until it is reset."""

    def __init__(self, gpu: FakeGpu, process: str) -> None:
        self.gpu, self.process = gpu, process
        self.live = self.context = self._held = self._peak = 0

    def total(self) -> int:
        return self.gpu.total

    def free(self) -> int:
        return self.gpu.free

    def held(self) -> int:
        return self._held

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._held = self._peak = self.live
        self._tell()

    def alloc(self, nbytes: int) -> None:
        if self.live + nbytes - self._held > self.gpu.free:
            raise torch.OutOfMemoryError(f"{nbytes} bytes of {self.gpu.free}")
        self.live += nbytes
        self._held = max(self._held, self.live)
        self._peak = max(self._peak, self._held)
        self._tell()

    def take_context(self, nbytes: int) -> None:
        """What CUDA and its libraries take beside the allocator."""
        self.context += nbytes
        self._tell()

    def _tell(self) -> None:
        self.gpu.taken[self.process] = self._held + self.context


class FakeBackend:
    """Of its Protocol, what a start reads."""

    name = numerics = "fake"
    is_exact = True
    has_threads = False


class RecordingMover(TorchPageMover):
    """Keeps the rows of gathers and scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[range] = []
        self.scattered: list[range] = []

    def gather(self, pages_RPN: torch.Tensor, rows: range, *args: Any) -> int:
        self.gathered.append(rows)
        return super().gather(pages_RPN, rows, *args)

    def scatter(self, pages_RPN: torch.Tensor, rows: range, *args: Any) -> int:
        self.scattered.append(rows)
        return super().scatter(pages_RPN, rows, *args)


@dataclass
class FakeModel:
    """Takes `per_token` bytes for each token of a forward while it runs, and `context` bytes at the first one."""

    shape: EngineShape
    memory: FakeMemory
    per_token: int
    context: int = 0
    graphs: int = 0
    """Bytes that capturing takes."""
    fails_at: str = ""
    """The step of the start, or the number of the forward, at which memory runs out."""
    error: Exception = field(default_factory=RuntimeError)
    bound: list[int] = field(default_factory=list)
    forwards: list[ModelWorkerBatch] = field(default_factory=list)
    mover: RecordingMover = field(default_factory=RecordingMover)

    def load(self) -> None:
        self.memory.alloc(self.shape.weights_nbytes)

    def reach(self, step: str) -> None:
        if step == self.fails_at:
            raise self.error

    def bind(self, num_pages: int) -> BoundModel:
        self.bound.append(num_pages)
        nbytes = (num_pages + 1) * self.shape.page_nbytes
        self.memory.alloc(nbytes)
        model = self.shape.model
        pool = TokenToKVPool(
            num_pages=min(num_pages, 10) + 1,
            page_size=self.shape.cache.page_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.shape.dtype,
            device=torch.device("cpu"),
            mover=self.mover,
        )
        backend: Any = FakeBackend()
        runner: Any = FakeRunner(self)
        stream: Any = FakeStream(self, nbytes, runner)
        return BoundModel(pool, backend, runner, stream)


@dataclass
class FakeRunner:
    """Of a ModelRunner, its graphs."""

    model: FakeModel
    captured: int = 0

    def measure_graphs(self) -> int:
        self.model.reach("measure_graphs")
        return self.model.graphs

    def capture_graphs(self) -> None:
        self.model.reach("capture_graphs")
        self.model.memory.alloc(self.model.graphs)
        self.captured = self.model.graphs


@dataclass
class FakeStream:
    """A ForwardStream that takes memory and always samples token 1."""

    model: FakeModel
    pool_nbytes: int
    runner: FakeRunner

    def submit(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        memory, nbytes = self.model.memory, int(batch.lengths_B.sum()) * self.model.per_token
        self.model.reach(f"forward {len(self.model.forwards)}")
        if not memory.context:
            memory.take_context(self.model.context)
        memory.alloc(nbytes)
        memory.live -= nbytes
        self.model.forwards.append(batch)
        return batch

    def sample(self, forwarded: ModelWorkerBatch, vocab_mask: object = None) -> FakeResult:
        return FakeResult(len(forwarded.sampled_B))

    def close(self) -> None:
        self.model.memory.live -= self.pool_nbytes + self.runner.captured


@dataclass
class FakeResult:
    num_sampled: int

    def wait(self) -> Sampled:
        return Sampled([1] * self.num_sampled, {0: Logprobs(struct.pack("<f", -1.0))})
