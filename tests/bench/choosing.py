"""What does it cost the router to choose the nodes of a request, under each policy?

`Placement.route` over fleets whose nodes all have work and caches of their own; a tenth of the nodes of each role
hold the first half of some prompt. Nothing is sent. Times are those of the CPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from router.dispatch.fleet_view import FleetView
from router.dispatch.placement import Placement
from router.dispatch.policy import POLICIES
from shared.protocol.messages import Load, Role, Work
from shared.protocol.sampling_params import SamplingParams
from tests.bench.stats import percentile
from tests.bench.table import Row
from tests.unit.router.dispatched import PAGE, FakeNode

SIZES = (2, 16, 500)
"""Nodes of each role."""
PROMPT_LEN = 2048
HOLDERS = 10
"""One node in so many holds half of the prompt."""
NUM_PROMPTS = 8
SECONDS = 1.0


class _Nodes:
    """A fleet of nodes that are all live."""

    def __init__(self, num_each: int, prompts: Sequence[tuple[int, ...]]) -> None:
        rng = random.Random(0)
        self._of = {role: [FakeNode(f"{role}-{i}", role) for i in range(num_each)] for role in Role}
        for nodes in self._of.values():
            for i, node in enumerate(nodes):
                node.load = Load(
                    num_running=rng.randrange(16, 32),
                    num_pages=8192,
                    num_free_pages=rng.randrange(4096),
                    gen_throughput=rng.uniform(500, 1000),
                    kv_bytes_per_s=1e9 / rng.uniform(0.5, 2.0),
                    num_queued_tokens=rng.randrange(8192),
                    prefill_tokens_per_s=rng.uniform(5000, 10_000),
                )
                ids = prompts[i // HOLDERS % NUM_PROMPTS] if i % HOLDERS == 0 else tuple(range(i, i + 1024))
                node.holds(PROMPT_LEN // PAGE // 2, ids)

    def live(self, role: Role) -> Sequence[FakeNode]:
        """All of a role."""
        return self._of[role]

    def why_none(self, role: Role) -> str:
        """Never asked."""
        raise AssertionError(role)


def run_policy(policy: str, num_each: int) -> dict[str, Any]:
    """CPU microseconds for one request."""
    prompts = [tuple(range(10_000 * i, 10_000 * i + PROMPT_LEN)) for i in range(1, NUM_PROMPTS + 1)]
    works = [Work(ids, SamplingParams(max_new_tokens=64)) for ids in prompts]
    placement = Placement(
        FleetView(_Nodes(num_each, prompts), time.monotonic),
        policies=dict.fromkeys(Role, POLICIES[policy]),
        local_prefill_tokens=None,
        random=random.Random(0),
    )
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.thread_time()
        placement.route(works[len(times) % NUM_PROMPTS], split=False)
        times.append(time.thread_time() - start)
    times.sort()
    return {
        "bench": "choosing",
        "policy": policy,
        "nodes": 2 * num_each,
        "us": round(1e6 * percentile(times, 50)),
        "p99_us": round(1e6 * percentile(times, 99)),
    }


def main() -> Iterator[dict[str, Any]]:
    """A row for each policy and size."""
    for policy in POLICIES:
        for num_each in SIZES:
            yield run_policy(policy, num_each)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The default policy by the number of nodes."""
    return {f"ttft, {row['nodes']} nodes, us": row["us"] for row in rows if row["policy"] == "ttft"}
