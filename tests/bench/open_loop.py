"""Requests that come on their own schedule to a node without a network, and what they see there."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field

from shared.config import ScheduleOptions
from shared.engine.launcher import Launcher
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import Plan
from shared.scheduling.req import Req
from tests.bench.devices import Device, make_req, release
from tests.bench.timed_stream import VOCAB_SIZE

STOP_EVERY = 48
"""One token id in so many stops a request."""
MAX_NEW_TOKENS = 192
PROMPT_LEN = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """`num_reqs` requests, `rate` a second; all at once where the rate is None."""

    num_reqs: int
    rate: float | None
    prefilled: bool = False
    """Elsewhere. Only a device without KV can do without that of the prompts."""

    def arrivals(self) -> deque[tuple[float, Req]]:
        """Seconds from the start, and who comes then."""
        rng, at_s = random.Random(0), 0.0
        params = [
            SamplingParams(
                max_new_tokens=MAX_NEW_TOKENS,
                stop_token_ids=tuple(range(0, VOCAB_SIZE, STOP_EVERY)),
                ignore_eos=True,
                seed=rid,
            )
            for rid in range(self.num_reqs)
        ]
        coming: deque[tuple[float, Req]] = deque()
        for rid in range(self.num_reqs):
            at_s += rng.expovariate(self.rate) if self.rate is not None else 0.0
            coming.append((at_s, make_req(rid, PROMPT_LEN, params[rid])))
        return coming


@dataclass(slots=True)
class Seen:
    """What came of a load."""

    num_computed: int = 0
    num_useful: int = 0
    tokens_s: float = 0.0
    """Of useful tokens, until the last request had been taken in: after that the batch only shrinks."""
    waits_ms: list[float] = field(default_factory=list)
    ttfts_ms: list[float] = field(default_factory=list)


class BenchNode:
    """One turn plans, launches and commits; subclasses say how often of each."""

    def __init__(self, device: Device, max_running: int) -> None:
        self.ledger = device.ledger
        self.batcher = Batcher(device.ledger, ScheduleOptions(max_running_requests=max_running))
        self.seen = Seen()
        self._arrived_at: dict[Req, float] = {}
        self._never_planned: set[Req] = set()
        self._never_sampled: set[Req] = set()
        self._landed: deque[Req] = deque()

    def turn(self) -> bool:
        """False when there was nothing to do."""
        raise NotImplementedError

    def serve(self, load: Load) -> Seen:
        """Until all have ended."""
        coming, start = load.arrivals(), time.perf_counter()
        while coming or self._arrived_at:
            now = time.perf_counter()
            while coming and start + coming[0][0] <= now:
                at_s, req = coming.popleft()
                self._arrived_at[req] = start + at_s
                self._never_planned.add(req)
                self._never_sampled.add(req)
                (self._landed.append if load.prefilled else self.batcher.add)(req)
            if not self.turn() and coming:
                time.sleep(max(start + coming[0][0] - time.perf_counter(), 0))
            if coming or self._never_planned:
                self.seen.tokens_s = self.seen.num_useful / (time.perf_counter() - start)
        while self.turn():  # under overlap one more may be in flight
            pass
        return self.seen

    def plan(self) -> Plan:
        """A decision; whoever it takes in has waited until now."""
        while self._landed and len(self.ledger.live) < self.ledger.rows.num_rows:
            self._take_over(self._landed.popleft())
        plan, now = self.batcher.plan(), time.perf_counter()
        for item in plan.batch.items if plan.batch is not None and self._never_planned else ():
            if item.req in self._never_planned:
                self._never_planned.remove(item.req)
                self.seen.waits_ms.append(1e3 * (now - self._arrived_at[item.req]))
        return plan

    def advance(self, launcher: Launcher, plan: Plan) -> bool:
        """Launch `plan`, and account for what `launcher` had in flight: those that end give their pages back."""
        if plan.batch is not None:
            self.seen.num_computed += sum(item.position is not None for item in plan.batch.items)
        outcome = launcher.turn(plan)
        assert not outcome.failed
        now = time.perf_counter()
        self.seen.num_useful += len(outcome.sampled)
        for req in outcome.sampled if self._never_sampled else ():
            if req in self._never_sampled:
                self._never_sampled.remove(req)
                self.seen.ttfts_ms.append(1e3 * (now - self._arrived_at[req]))
        for req in outcome.finished:
            release(req, self.batcher, self.ledger)
            del self._arrived_at[req]
        return outcome.worked

    def _take_over(self, req: Req) -> None:
        """As if its KV and its first token had come from a prefill node."""
        kv = self.ledger.admit(self.ledger.match_prefix(req.ids, ""), "")
        assert kv is not None and self.ledger.grow(kv, len(req.ids))
        kv.kv_committed_len = kv.kv_allocated_len = len(req.ids)
        req.kv, req.num_sampled = kv, 1
        req.ids.append(1)
        self.batcher.admit_prefilled(req)
