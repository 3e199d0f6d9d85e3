"""A ForwardStream that runs late, as a CUDA stream does: what a call queues runs when the scheduler waits for it.

A call may raise half-way. What it had queued by then still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import VocabMask
from shared.kvcache.allocator import PageCopy
from shared.scheduling.commit import Sampled


@dataclass(frozen=True)
class LatePoint:
    """The point behind everything that was queued when it was made."""

    stream: LateStream
    num_queued: int

    def wait(self) -> None:
        self.stream.run_to(self.num_queued)


@dataclass(frozen=True)
class LateResult:
    point: LatePoint
    num_samples: int

    def wait(self) -> Sampled:
        self.point.wait()
        return Sampled([10] * self.num_samples)


@dataclass(frozen=True)
class LateCopy:
    point: LatePoint

    def wait(self) -> float:
        self.point.wait()
        return 0.001


@dataclass
class LateStream:
    """`raising` names the calls that raise half-way: "submit", "sample" or "copy", each with its error."""

    raising: dict[str, Exception] = field(default_factory=dict)
    queue: list[frozenset[int]] = field(default_factory=list)
    """The pages that each queued kernel names, in launch order."""
    num_run: int = 0
    error_when_run: Exception | None = None
    """What every wait raises that comes to a kernel, as after an illegal address."""

    @property
    def pages_in_use(self) -> frozenset[int]:
        """Pages that kernels name which have not run."""
        return frozenset[int]().union(*self.queue[self.num_run :])

    def submit(self, batch: ModelWorkerBatch) -> tuple[frozenset[int], int]:
        pages = frozenset(batch.page_table_BP.flatten().tolist())
        self._call("submit", pages)
        return pages, len(batch.sampled_B)

    def sample(
        self, forwarded: tuple[frozenset[int], int], vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> LateResult:
        pages, num_samples = forwarded
        self._call("sample", pages)
        return LateResult(self.fence(), num_samples)

    def copy(self, pages: PageCopy) -> LateCopy:
        self._call("copy", pages.device_pages)
        return LateCopy(self.fence())

    def fence(self) -> LatePoint:
        return LatePoint(self, len(self.queue))

    def close(self) -> None:
        self.run_to(len(self.queue))

    def run_to(self, num_queued: int) -> None:
        if num_queued > self.num_run and self.error_when_run is not None:
            raise self.error_when_run
        self.num_run = max(self.num_run, num_queued)

    def _call(self, name: str, pages: Sequence[int] | frozenset[int]) -> None:
        self.queue.append(frozenset(pages))
        if (error := self.raising.pop(name, None)) is not None:
            raise error
        self.queue.append(frozenset(pages))
