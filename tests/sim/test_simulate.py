"""One candidate under one workload: what a run says of its clients and of its nodes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.figures import Slo, arrival_seconds
from planner.profile import NodeKind, Profile, RouterCost, TransferCost
from planner.simulate import Bottleneck, Run, fleet_shape, simulate
from planner.simulator.fleet import SimFleet
from planner.traffic.trace import SimRequest
from shared.config import ScheduleOptions
from tests.bench.figures import figures_of_run
from tests.sim.watched_fleet import WatchedFleet
from tests.sim.workloads import unrelated
from tests.unit.planner import plan_rig

NODE = msgspec.structs.replace(plan_rig.NODE, pool_tokens=8192, context_length=2048)
PROFILE = msgspec.structs.replace(plan_rig.PROFILE, node=NODE)
SPLIT = Candidate(num_prefill=1, num_decode=1, local_prefill_tokens=0)
SLO = Slo(ttft_s=0.2, itl_s=0.02)


def profile(**changes: Any) -> Profile:
    """PROFILE with other fields, or with other fields of its node."""
    own = {name: changes.pop(name) for name in list(changes) if name in NodeKind.__struct_fields__}
    return msgspec.structs.replace(PROFILE, node=msgspec.structs.replace(NODE, **own), **changes)


def load(
    num: int = 60, *, gap_s: float = 0.2, input_len: int = 256, output_len: int = 20
) -> list[SimRequest]:
    """Requests that share nothing."""
    return unrelated(random.Random(1), num, gap_s=gap_s, input_lens=[input_len], output_len=output_len)


def run(requests: Sequence[SimRequest], of: Profile = PROFILE, candidate: Candidate = SPLIT) -> Run:
    """With the SLO of these tests."""
    return simulate(candidate, requests, profile=of, slo=SLO)


def test_the_same_arguments_give_the_same_run() -> None:
    assert run(load()) == run(load())


def test_a_request_alone_takes_what_the_profile_says() -> None:
    """A chunk of 256, a transfer of 16 pages beside it, and then 19 decode steps of one request."""
    figures = figures_of_run(run(load(1)), load(1), SLO)
    assert figures.ttft_s.mean == pytest.approx(0.002 + 256 * 1e-4, abs=0.002)
    assert figures.itl_s.mean == pytest.approx(0.005 + 1e-4, rel=0.2)
    assert figures.good_share == 1.0


def test_the_routers_thread_delays_a_request_and_its_tokens() -> None:
    (free,) = run(load(1)).served
    (costly,) = run(load(1), profile(router=RouterCost(request_s=0.05, token_s=0.004))).served
    assert free is not None and costly is not None
    assert costly.ttft_s == pytest.approx(free.ttft_s + 0.05 + 0.004, abs=1e-9)
    assert costly.itl_s == pytest.approx(free.itl_s, rel=0.05), "a delay is not a gap"


def test_nodes_have_the_flags_that_they_were_measured_with() -> None:
    measured = profile(
        disable_radix_cache=True,
        host_kv_tokens=1024,
        schedule={"schedule_policy": "lpm", "enable_mixed_chunk": True, "disable_overlap_schedule": True},
    )
    node = fleet_shape(SPLIT, measured).prefill
    assert (node.disable_radix_cache, node.host_kv_tokens) == (True, 1024)
    assert node.schedule == ScheduleOptions(
        chunked_prefill_size=512,
        max_running_requests=32,
        schedule_policy="lpm",
        enable_mixed_chunk=True,
        disable_overlap_schedule=True,
    )
    other = Candidate(num_prefill=0, num_decode=1, enable_mixed_chunk=False)
    changed = fleet_shape(other, measured).decode.schedule
    assert (changed.schedule_policy, changed.enable_mixed_chunk) == ("lpm", False)
    assert changed.disable_overlap_schedule
    again = [request_at(0.0, 512, 4), request_at(1.0, 512, 4)]
    again[1] = dataclasses.replace(again[1], blocks=again[0].blocks)
    assert run(again).cached_share > 0.4 and run(again, measured).cached_share == 0.0


def test_what_does_not_fit_has_failed() -> None:
    refused = msgspec.structs.replace(NODE, context_length=200)
    requests = [*load(3, input_len=100), *(request_at(9.0, 300, 5), request_at(9.1, 190, 50))]
    figures = figures_of_run(run(requests, profile(**msgspec.structs.asdict(refused))), requests, SLO)
    assert (figures.num_reqs, figures.num_failed) == (5, 2), (
        "one has no room at all, one no room for its output"
    )
    assert figures.good_share == pytest.approx(0.6)


def request_at(at_s: float, input_len: int, output_len: int) -> SimRequest:
    """One that shares nothing with those of `load`."""
    first = 1_000_000 + int(at_s * 1000)
    return SimRequest(at_s, input_len, output_len, tuple(range(first, first + input_len // 32 + 1)), 32)


def test_a_fleet_that_serves_nothing_has_no_latency() -> None:
    result = run(load(2, input_len=300), profile(context_length=200))
    assert result.bottleneck is Bottleneck.DECODE_PAGES
    assert result.served == (None, None)


def test_retracted_prompts_are_computed_again() -> None:
    # admitted by what a client allows, which is not all used up, then too long for the pool together
    burst = load(20, gap_s=1e-6, input_len=64, output_len=100)
    small = profile(pool_tokens=640, context_length=320)
    fleet = WatchedFleet(fleet_shape(SPLIT, small), plan_rig.FORWARD)
    fleet.submit(burst)
    fleet.run()
    assert all(outcome.ok for outcome in fleet.outcomes.values())
    assert sum(node.stream.num_extend_tokens for node in fleet.nodes.values()) > 1.05 * 20 * 64


BOTTLENECKS = {
    Bottleneck.NONE: (load(), PROFILE),
    Bottleneck.PREFILL: (load(gap_s=0.02), PROFILE),
    Bottleneck.DECODE_COMPUTE: (
        load(output_len=60),
        profile(forward=CostModel(a=0.002, b=1e-4, c=0.0, d=0.03, e=1e-4, f=0.0)),
    ),
    Bottleneck.DECODE_PAGES: (load(gap_s=0.1, output_len=60), profile(pool_tokens=512, context_length=512)),
    Bottleneck.LINKS: (load(gap_s=0.5), profile(transfer=TransferCost(latency_s=2.0, bytes_s=1e9))),
    Bottleneck.ROUTER: (load(gap_s=0.05), profile(router=RouterCost(request_s=0.1, token_s=0.0))),
}


@pytest.mark.parametrize("cause", list(Bottleneck), ids=lambda cause: cause.name)
def test_the_bottleneck_is_what_was_planted(cause: Bottleneck) -> None:
    requests, of = BOTTLENECKS[cause]
    result = run(requests, of)
    assert result.bottleneck is cause, result
    assert all(result.served)


def test_a_first_token_that_is_just_in_time_is_no_cause() -> None:
    """The request misses the other bound alone."""
    (one,) = run(load(1)).served
    assert one is not None
    slo = Slo(ttft_s=one.ttft_s, itl_s=one.itl_s / 2)
    assert simulate(SPLIT, load(1), profile=PROFILE, slo=slo).bottleneck is Bottleneck.DECODE_COMPUTE


def test_seconds_of_arrival_count_a_gap_for_each_request() -> None:
    assert arrival_seconds([0.0, 1.0, 2.0]) == 3.0
    assert arrival_seconds([5.0]) == 0.0


def test_a_client_that_allows_no_more_than_it_gets_reserves_less() -> None:
    """The decode node reserves room for what is allowed, so that fewer requests run at once."""
    of = profile(pool_tokens=1024, context_length=512)
    burst = load(12, gap_s=1e-6, input_len=64, output_len=60)
    exact = [dataclasses.replace(request, max_new_tokens=60) for request in burst]
    generous = [dataclasses.replace(request, max_new_tokens=400) for request in burst]
    results = [run(requests, of) for requests in (exact, generous)]
    exactly, generously = (figures_of_run(result, burst, SLO) for result in results)
    assert (exactly.num_failed, generously.num_failed) == (0, 0)
    assert exactly.ttft_s.mean < generously.ttft_s.mean


def test_a_router_knows_the_load_of_a_node_as_of_its_latest_ping() -> None:
    fleet = SimFleet(fleet_shape(Candidate(num_prefill=0, num_decode=1), PROFILE), plan_rig.FORWARD)
    fleet.submit([request_at(1.2, 64, 500)])
    node = fleet.nodes["d0000"]
    fleet.run(until=1.9)
    assert (node.vitals.published.num_running, node.load.num_running) == (1, 0)
    fleet.run(until=2.9)
    assert node.load.num_running == 1
    fleet.run(until=20.0)
    assert node.load.num_running == 0
