"""A node's share of a GPU: agreed with the other nodes there, measured, and taken before it is ready (ADR 32)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shared import log
from shared.engine.cuda.batches import StartBatches
from shared.engine.cuda.device_memory import CudaMemory, DeviceMemory, gpu_uuid
from shared.engine.cuda.gpu_claims import GpuClaim, claims_folder
from shared.engine.cuda.self_test import self_test
from shared.engine.device_share import Bind, BoundModel, OnProgress
from shared.engine.engine_shape import MIN_PAGES, EngineShape, gib
from shared.engine.forward_stream import is_out_of_memory
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.errors import ConfigError
from shared.timeline import Clock

GPU_FRACTION = 0.9
"""Of the GPU's memory, for all nodes on it together. The rest is for CUDA contexts, more links and fragmentation."""
SETTLE_S = 5.0
"""Nodes that start within this time of each other know of each other before one of them takes its share. A node whose
share was given waits for none."""
POLL_S = 0.2
NUM_SCRATCH_PAGES = 4


class GpuShare:
    """The memory of one GPU.

    A node takes `mem_fraction_static` of the GPU in all. By itself it takes what 0.9 of the GPU leaves beside the
    nodes that run there, divided by the number of nodes that are starting.
    """

    def __init__(
        self,
        shape: EngineShape,
        memory: DeviceMemory,
        claim: GpuClaim,
        on_progress: OnProgress,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`claim` belongs to this object. Raises ConfigError when the whole GPU is too small for the model."""
        self._shape = shape
        self._memory = memory
        self._claim = claim
        self._on_progress = on_progress
        self._clock = clock
        self._sleep = sleep
        self._claimed_at = clock()
        self._batches = StartBatches(shape)
        self._needs = {"weights": shape.weights_nbytes, "links": shape.links_nbytes}
        """Bytes of everything but the KV pool: of what is known by now."""
        self._free_at_first = 0
        fraction = shape.cache.mem_fraction_static
        self._is_given = fraction is None and shape.cache.max_total_tokens is not None
        """True where --max-total-tokens alone says how much the node takes."""
        if fraction is not None:
            claim.take(int(memory.total() * fraction))
        self._require(int(memory.total() * (fraction or GPU_FRACTION)))

    @property
    def memory_mib(self) -> dict[str, int]:
        """What was measured."""
        return {f"{what}_mib": round(nbytes / 2**20) for what, nbytes in self._needs.items()}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other node loads on the GPU, and keep others from it. A node that dies leaves it at once.

        There is no deadline, since a large model may load for many minutes: the operator is told which process loads.
        """
        seen = 0
        while not self._claim.try_alone():
            if (pid := self._claim.loader()) != seen:
                log.event("waiting_for_gpu", device=self._shape.device, pid=pid, reason="it loads on the GPU")
                seen = pid
            loader = f"process {pid}" if pid else "another process"  # which has not told its id yet
            self._on_progress(f"waiting for {loader}, which loads on the GPU", 0.0)
            self._sleep(POLL_S)
        try:
            yield
        finally:
            self._claim.done_alone()

    def await_room(self) -> None:
        """Wait until the memory of the share is free, which a process that has just ended may still hold.

        After --gpu-memory-timeout-s the node goes on with less, where the model fits into that.
        """
        timeout_s = self._shape.cache.gpu_memory_timeout_s
        give_up_at = self._clock() + timeout_s
        least = sum(self._needs.values()) + self._least_kv_nbytes()
        while True:
            free, share = self._memory.free(), self._share()
            can_load = least <= min(free, share)
            if can_load and (self._is_given or share <= free):
                break
            if self._clock() >= give_up_at:
                if not can_load:
                    raise ConfigError(
                        f"{self._lack_of_room(least, free, share)}; waited {timeout_s:g} s (--gpu-memory-timeout-s)"
                    )
                log.event("gpu_share_not_free", device=self._shape.device, share=gib(share), free=gib(free))
                break
            self._on_progress("waiting for GPU memory", 0.0)
            self._sleep(POLL_S)
        self._memory.reset()
        self._free_at_first = self._memory.free() + self._memory.held()

    def measure(self, bind: Bind) -> None:
        """Run the largest forwards over a few scratch pages, and capture graphs there; then give the memory back."""
        memory, shape = self._memory, self._shape
        self._on_progress("measuring memory", 0.0)
        memory.reset()
        self._needs["weights"] = memory.held()
        bound = bind(NUM_SCRATCH_PAGES)
        try:
            self._run(bound, self._batches.largest())
            scratch_nbytes = shape.pool_nbytes(NUM_SCRATCH_PAGES)
            self._needs["activations"] = max(memory.peak() - self._needs["weights"] - scratch_nbytes, 0)
            with self._fitting("what CUDA graphs take"):
                self._needs["graphs"] = max(bound.runner.measure_graphs(), 0)
        finally:
            bound.stream.close()
        self._needs["other"] = max(self._free_at_first - memory.free() - memory.held(), 0)
        del bound
        memory.reset()

    def num_pages(self) -> int:
        """From --max-total-tokens, or from what the share leaves beside everything that was measured."""
        shape = self._shape
        if shape.cache.mem_fraction_static is None and not self._is_given:  # the share depends on other nodes
            self._sleep(max(self._claimed_at + SETTLE_S - self._clock(), 0.0))
        may_take = min(self._share(), self._memory.free() + self._needs["weights"] + self._needs["other"])
        self._require(may_take)
        given = shape.given_pages(self._memory.total())
        left = may_take - sum(self._needs.values()) - shape.page_nbytes
        num_pages = shape.useful_pages(left) if given is None else given
        self._needs["kv"] = shape.pool_nbytes(num_pages)
        self._claim.take(sum(self._needs.values()))
        return num_pages

    def warm_up(self, bound: BoundModel) -> None:
        """Capture graphs, run each shape of forward over the scratch page, and move it: kernels are compiled."""
        self._on_progress("warming up", 0.0)
        with self._fitting("what CUDA graphs take"):
            bound.runner.capture_graphs()
        self._run(bound, [*self._batches.largest(), *self._batches.usual()])
        with self._fitting("a copy of a page"):
            pool = bound.pool
            page = torch.empty(pool.gather_nbytes(1, 1), dtype=torch.uint8, device=pool.device)
            for layer in (0, pool.num_layers - 1):  # of different groups, where there are two
                gather = pool.gather([0], layer, 1, page, seed=0)
                if not isinstance(gather, int):
                    gather.wait()
                pool.scatter([0], layer, 1, page, seed=0)
        self._on_progress("testing", 0.0)
        with self._fitting("the self test"):
            self_test(bound, self._shape, self._batches)

    def close(self) -> None:
        """Leave the GPU to the other nodes."""
        self._claim.close()

    def _run(self, bound: BoundModel, forwards: Sequence[ModelWorkerBatch]) -> None:
        """Run forwards one after the other. Raises ConfigError when one does not fit."""
        for batch in forwards:
            size = f"{int(batch.lengths_B.sum())} tokens and {len(batch.rows_B)} rows"
            with self._fitting(f"a forward of {size}"):
                bound.stream.sample(bound.stream.submit(batch), self._batches.mask_of(batch)).wait()

    @contextmanager
    def _fitting(self, what: str) -> Iterator[None]:
        """Raise ConfigError, with the numbers, when memory runs out: torch's allocator, CUDA and Triton say so."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self._shape.name} does not fit on {self._shape.device}: {self._list_of_needs()}, and {what} does "
                "not fit beside them; lower --chunked-prefill-size, --max-running-requests, --context-length or "
                "--cuda-graph-max-bs"
            ) from error

    def _share(self) -> int:
        """Bytes that this node may take in all."""
        total, fraction = self._memory.total(), self._shape.cache.mem_fraction_static
        if fraction is not None:
            return int(total * fraction)
        if self._is_given:
            return total
        others = self._claim.others()
        return max((int(total * GPU_FRACTION) - others.nbytes) // (1 + others.num_starting), 0)

    def _least_kv_nbytes(self) -> int:
        """Of the KV pool that was asked for, or of the smallest; with the scratch page."""
        num_pages = self._shape.given_pages(self._memory.total()) or MIN_PAGES
        return self._shape.pool_nbytes(num_pages)

    def _lack_of_room(self, least: int, free: int, share: int) -> str:
        """Why the model cannot be loaded now."""
        return (
            f"{self._shape.name} needs {gib(least)} of {self._shape.device}, which has {gib(free)} free of "
            f"{gib(self._memory.total())} (this node may take {gib(share)}, and {gib(self._claim.others().nbytes)} "
            f"belong to other nodes; nodes that share a GPU start within {SETTLE_S:g} s of each other, or have "
            "--mem-fraction-static)"
        )

    def _require(self, may_take: int) -> None:
        """Raise ConfigError, with the numbers, when the smallest KV pool does not fit beside what is needed."""
        kv_nbytes = self._least_kv_nbytes()
        if (need := sum(self._needs.values()) + kv_nbytes) > may_take:
            raise ConfigError(
                f"{self._shape.name} does not fit on {self._shape.device}: it needs {gib(need)} "
                f"({self._list_of_needs()}, the KV pool at least {gib(kv_nbytes)}) and may take {gib(may_take)} of "
                f"{gib(self._memory.total())}; raise --mem-fraction-static, or lower --max-running-requests, "
                "--chunked-prefill-size or --max-total-tokens"
            )

    def _list_of_needs(self) -> str:
        return ", ".join(f"{what} {gib(nbytes)}" for what, nbytes in self._needs.items())


def gpu_share(shape: EngineShape, on_progress: OnProgress) -> GpuShare:
    """The share of the GPU that the shape names."""
    claim = GpuClaim(claims_folder(gpu_uuid(shape.device)))
    return GpuShare(shape, CudaMemory(shape.device), claim, on_progress)
