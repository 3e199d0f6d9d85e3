"""A device that needs no GIL: forwards that are nothing but a time, as a GPU's are to the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.cost_model import CostModel
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.scheduling.commit import Sampled

VOCAB_SIZE = 4096
SPIN_S = 2e-4
"""A sleep ends about so much too late; the last of a wait is therefore spun, as CUDA does."""


@dataclass(frozen=True, slots=True)
class TimedResult:
    """`copy_done` of a forward that ends at `done_at`, whatever Python does meanwhile."""

    done_at: float
    token_ids: list[int]

    def wait(self) -> Sampled:
        left = self.done_at - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < self.done_at:
            pass
        return Sampled(self.token_ids)


class TimedStream:
    """A ForwardStream whose forwards run one after the other, each for a given time of the wall clock.

    There is no worker thread on purpose: it would need the GIL to begin the next forward, and a device does not.
    Queueing a forward is free, as it nearly is with a CUDA graph. A token is a function of (seed, output position),
    so that a request's output is the same whatever it is batched with, and ends where its seed says.
    """

    def __init__(self, takes_s: Callable[[ModelWorkerBatch], float]) -> None:
        self._takes_s = takes_s
        self._free_at = 0.0
        self.num_forwards = 0
        self.busy_s = 0.0
        """Of all forwards so far, those in flight included."""

    def submit(self, batch: ModelWorkerBatch) -> TimedResult:
        """Queue a forward behind those before it."""
        self._free_at = max(self._free_at, time.perf_counter())
        takes_s = self._takes_s(batch)
        self._free_at += takes_s
        self.busy_s += takes_s
        self.num_forwards += 1
        draws = batch.sampling.draws
        uniforms_S = np.zeros(len(batch.sampled_B)) if draws is None else draws.uniforms_S
        return TimedResult(self._free_at, (uniforms_S * VOCAB_SIZE).astype(int).tolist())

    def sample(self, forwarded: TimedResult, vocab_mask: object = None) -> TimedResult:
        return forwarded

    def copy(self, pages: object) -> TimedResult:
        raise NotImplementedError("there is no KV to copy")

    def close(self) -> None:
        pass


def forward_s(costs: CostModel, batch: ModelWorkerBatch) -> float:
    """What a forward takes by a cost model. Extends are the first sequences of a batch, decodes the last."""
    num_extends = len(batch.rows_B) - batch.num_decodes
    starts, lengths = batch.starts_B.tolist(), batch.lengths_B.tolist()
    seconds = 0.0
    if num_extends:
        seconds = costs.extend_s(zip(starts[:num_extends], lengths[:num_extends], strict=True))
    if batch.num_decodes:
        kv_tokens = sum(starts[num_extends:]) + sum(lengths[num_extends:])
        seconds += costs.decode_s(batch.num_decodes, kv_tokens, beside_prefill=num_extends > 0)
    return seconds
