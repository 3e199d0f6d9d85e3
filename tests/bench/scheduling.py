"""How long does one scheduling decision take, with 256 requests running and 1,000 waiting, under each policy?

The real Batcher over the real ledger. Nothing is computed: between two decisions the tokens of the last are
committed by hand, outside the measured time. Every decision is a decode step of all that run, and before it the
waiting queue is put in order and its first request is tried and found too large for the pages that are left.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.build import make_ledger
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import LPM_MAX_WAITING, POLICIES
from shared.timeline import Timeline
from tests.bench.table import Row

PAGE_SIZE = 16
NUM_PAGES = 16_000
NUM_RUNNING, NUM_WAITING = 256, 1000
PROMPT_LEN, PREFIX_LEN, NUM_PREFIXES = 512, 256, 50
MAX_NEW_TOKENS = 4096
WARM_UP, STEPS = 20, 300


@dataclass(frozen=True)
class Case:
    """A row of the table. With no slot free, nobody can be admitted, and the queue need not be ordered."""

    policy: str
    num_waiting: int = NUM_WAITING
    slot_free: bool = True
    ignore_eos: bool = False
    priority: bool = False
    cache_changes: bool = True
    """Whether the RadixCache learns of something between two steps, so that matches must be found anew."""


def cases() -> Iterator[Case]:
    """Every policy at the sizes that are promised, then what changes the price."""
    for policy in POLICIES:
        yield Case(policy)
    yield Case("dfs-weight", cache_changes=False)
    yield Case("lpm", num_waiting=LPM_MAX_WAITING)
    yield Case("lpm", num_waiting=LPM_MAX_WAITING, cache_changes=False)
    yield Case("fcfs", slot_free=False)
    yield Case("fcfs", ignore_eos=True)
    yield Case("fcfs", priority=True)


def make_req(rid: str, ids: list[int], rng: random.Random, *, ignore_eos: bool) -> Req:
    work = Work(
        tuple(ids),
        SamplingParams(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=ignore_eos),
        priority=rng.randrange(5),
        routing_key=f"key {rng.randrange(20)}",
    )
    return Req(ReqKey("bench", rid), work, Timeline(Role.DECODE), MAX_NEW_TOKENS)


def start_running(batcher: Batcher, ledger: KVLedger, req: Req) -> None:
    """As if its prompt had been computed, and its first token sampled."""
    kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    assert kv is not None and ledger.grow(kv, len(req.ids))
    kv.kv_committed_len = kv.kv_allocated_len = len(req.ids)
    ledger.cache_unfinished_req(kv, req.ids)
    req.kv = kv
    req.ids.append(0)
    req.num_sampled = 1
    batcher.admit_prefilled(req)


def prepare(case: Case) -> tuple[Batcher, KVLedger]:
    rng = random.Random(1)
    num_rows = NUM_RUNNING + case.slot_free
    ledger = make_ledger(NUM_PAGES + 1, CacheOptions(page_size=PAGE_SIZE), num_rows, 8192)
    options = ScheduleOptions(
        schedule_policy=case.policy,
        max_running_requests=num_rows,
        enable_priority_scheduling=case.priority,
        retract_policy="recompute",
    )
    batcher = Batcher(ledger, options)
    prefixes = [[rng.randrange(50_000) for _ in range(PREFIX_LEN)] for _ in range(NUM_PREFIXES)]
    for i in range(NUM_RUNNING + case.num_waiting):
        ids = rng.choice(prefixes) + [rng.randrange(50_000) for _ in range(PROMPT_LEN - PREFIX_LEN)]
        req = make_req(str(i), ids, rng, ignore_eos=case.ignore_eos)
        if i < NUM_RUNNING:
            start_running(batcher, ledger, req)
        else:
            batcher.add(req)
    return batcher, ledger


def commit(batch: ScheduleBatch, ledger: KVLedger, *, cache_changes: bool) -> None:
    pages = ledger.allocator.alloc(1) if cache_changes else None
    if pages is not None:
        ledger.radix_cache.insert([60_000 + pages[0]] * PAGE_SIZE, pages)
    for item in batch.items:
        assert item.req.kv is not None
        item.req.kv.kv_committed_len = item.start + item.length
        item.req.ids.append(1)


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of `Batcher.plan`."""
    (batcher, ledger), times = prepare(case), []
    gc.collect()
    gc.disable()  # a collection belongs to no step in particular
    try:
        for _ in range(WARM_UP + STEPS):
            start = time.perf_counter()
            batch = batcher.plan().batch
            times.append(1e3 * (time.perf_counter() - start))
            assert batch is not None and not batch.is_extend and len(batch.items) == NUM_RUNNING
            commit(batch, ledger, cache_changes=case.cache_changes)
    finally:
        gc.enable()
    assert len(batcher.waiting_queue) == case.num_waiting
    times = sorted(times[WARM_UP:])
    return {
        "bench": "scheduling",
        "policy": case.policy,
        "acts_as": batcher.schedule_policy,
        "num_running": NUM_RUNNING,
        "num_waiting": case.num_waiting,
        "slot_free": case.slot_free,
        "ignore_eos": case.ignore_eos,
        "priority": case.priority,
        "cache_changes": case.cache_changes,
        "step_ms": round(statistics.median(times), 3),
        "step_p99_ms": round(times[len(times) * 99 // 100], 3),
    }


def main() -> Iterator[dict[str, Any]]:
    """All rows."""
    return map(measure, cases())


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Milliseconds of a decision under the default policy and under the slowest."""
    slowest = max(rows, key=lambda row: row["step_ms"])
    return {
        "default_policy_ms": rows[0]["step_ms"],
        "slowest_ms": slowest["step_ms"],
        "slowest_policy": slowest["policy"],
    }
