"""Stands where the forward stream stands: no tensors, only the time a forward takes and cheap tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost_model import CostModel
from planner.simulator.events import NodeClock
from shared.kvcache.allocator import PageCopy
from shared.scheduling.commit import Sampled
from shared.scheduling.plan import ScheduleBatch

EOS = 0
FIRST_OUTPUT_TOKEN = 2
NUM_OUTPUT_TOKENS = 50_000
VOCAB_SIZE = 1 << 40
"""Token ids of prompts count blocks of traces up to here; see `trace`."""

PAGE_COPY_S = 2e-5
"""512 KiB, a page of 32 tokens of the built-in model, over PCIe 4."""

TokenOf = Callable[[str, int], int]
"""(rid, output position) -> token. Whoever computes it, wherever, whenever: the same."""


def token_at(rid: str, position: int, output_len: int) -> int:
    """A token that tells its request and its position, and EOS as the last of `output_len`."""
    if position + 1 >= output_len:
        return EOS
    return FIRST_OUTPUT_TOKEN + (int(rid) * 1009 + position) % NUM_OUTPUT_TOKENS


@dataclass(frozen=True, slots=True)
class SimResult:
    """`copy_done` of a simulated forward: waiting for it moves the node's clock."""

    clock: NodeClock
    done_at: float
    token_ids: list[int]

    def wait(self) -> Sampled:
        """The tokens, when the forward has ended."""
        self.clock.wait_until(self.done_at)
        return Sampled(self.token_ids)


@dataclass(frozen=True, slots=True)
class SimCopyResult:
    """A copy between device and host."""

    clock: NodeClock
    done_at: float
    seconds: float

    def wait(self) -> float:
        """Its seconds, when it has ended."""
        self.clock.wait_until(self.done_at)
        return self.seconds


class SimStream:
    """A ForwardStream: forwards run one after the other, each as long as the cost model says.

    It takes the decisions themselves: tokens are a function of (rid, position), and a ModelWorkerBatch, being values
    for a device, names neither.
    """

    def __init__(self, clock: NodeClock, costs: CostModel, token_of: TokenOf) -> None:
        self._clock = clock
        self._costs = costs
        self._token_of = token_of
        self._free_at = 0.0
        self.busy_s = 0.0

    def submit(self, scheduled: ScheduleBatch) -> SimResult:
        """Queue a forward behind those before it."""
        seconds = self._seconds(scheduled)
        self._clock.wait_until(self._clock() + self._costs.host_s(len(scheduled.items)))
        self._free_at = max(self._free_at, self._clock()) + seconds
        self.busy_s += seconds
        tokens = [
            self._token_of(item.req.key.rid, item.position)
            for item in scheduled.items
            if item.position is not None
        ]
        return SimResult(self._clock, self._free_at, tokens)

    def sample(self, forwarded: SimResult, vocab_mask: object = None) -> SimResult:
        """Nothing is drawn, so nothing is masked."""
        return forwarded

    def copy(self, pages: PageCopy) -> SimCopyResult:
        """Queue a copy behind the forwards."""
        seconds = PAGE_COPY_S * len(pages.host_pages)
        self._free_at = max(self._free_at, self._clock()) + seconds
        return SimCopyResult(self._clock, self._free_at, seconds)

    def close(self) -> None:
        """Nothing runs."""

    def _seconds(self, batch: ScheduleBatch) -> float:
        seconds = 0.0
        if batch.extends:
            seconds = self._costs.extend_s((item.start, item.length) for item in batch.extends)
        if batch.decodes:
            kv_tokens = sum(item.start + item.length for item in batch.decodes)
            seconds += self._costs.decode_s(len(batch.decodes), kv_tokens, beside_prefill=bool(batch.extends))
        return seconds
