"""Windows of a trace come to what the whole trace comes to, within their intervals, and keep its bursts."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest

from planner.answer import Estimate
from planner.cost_model import CostModel
from planner.figures import Served, Slo, quantile
from planner.sample import Parts, estimate
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import NodeShape
from planner.traffic.trace import SimRequest
from planner.traffic.windows import Window, draw_windows, whole_window
from tests.bench.recorded import load_trace, scaled
from tests.sim.workloads import unrelated

SLO = Slo(ttft_s=1.0, itl_s=1.0)
FIGURES = ("good_share", "cached_share", "ttft_mean_s")
CACHE_TOKENS = 100_000
POOL_TOKENS = 12_000
"""Of each of four simulated nodes."""

Answered = tuple[SimRequest, Served, int]
"""A request, what its client saw, and how many of its prompt tokens were cached."""
Serve = Callable[[Sequence[SimRequest]], Iterable[Answered]]


def one_server(requests: Sequence[SimRequest]) -> Iterable[Answered]:
    """A queue before one server with an LRU of blocks: fast enough for whole traces, many times."""
    cache: OrderedDict[int, None] = OrderedDict()
    free_at = 0.0
    for request in requests:
        hits = next(
            (at for at, block in enumerate(request.blocks) if block not in cache), len(request.blocks)
        )
        cached = min(hits * request.block_tokens, request.input_len - 1)
        free_at = max(free_at, request.at_s) + (request.input_len - cached) * 1e-4 + request.output_len * 5e-4
        for block in request.blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) * request.block_tokens > CACHE_TOKENS:
            cache.popitem(last=False)
        ttft_s = free_at - request.at_s
        yield request, Served(ttft_s=ttft_s, e2e_s=ttft_s, num_tokens=request.output_len), cached


def simulated(requests: Sequence[SimRequest]) -> Iterable[Answered]:
    """The real schedulers and router, on nodes whose caches hold a part of the trace."""
    node = NodeShape(pool_tokens=POOL_TOKENS, context_length=POOL_TOKENS)
    shape = FleetShape(num_prefill=2, num_decode=2, prefill=node, decode=node)
    fleet = SimFleet(shape, CostModel(a=0.002, b=4e-5, c=1e-10, d=0.005, e=2e-5, f=0.0))
    fleet.submit(requests)
    fleet.run()
    for outcome in fleet.outcomes.values():
        assert outcome.ok and outcome.ended_at is not None
        e2e_s = outcome.ended_at - outcome.started_at
        seen = Served(ttft_s=outcome.ttft_s, e2e_s=e2e_s, num_tokens=outcome.num_tokens)
        yield outcome.request, seen, outcome.cached_tokens


@dataclass(frozen=True)
class Found:
    """What a trace comes to."""

    good_share: Estimate
    cached_share: Estimate
    ttft_mean_s: Estimate
    ttft_p99_s: float


def found_in(windows: Sequence[Window], serve: Serve = one_server) -> Found:
    """By the strata and weights of the windows."""
    runs = [[one for one in serve(window.requests) if window.counts(one[0])] for window in windows]
    num_counted: Counter[int] = Counter()
    for window, run in zip(windows, runs, strict=True):
        num_counted[window.stratum] += len(run)

    weights = [window.num_reqs / num_counted[window.stratum] for window in windows]

    def mean(total: Callable[[Answered], float], num: Callable[[Answered], int] = lambda one: 1) -> Estimate:
        totals, sizes = (
            np.array([weight * sum(map(of, run)) for weight, run in zip(weights, runs, strict=True)])
            for of in (total, num)
        )
        return estimate(Parts(totals, sizes, [window.stratum for window in windows]))

    return Found(
        good_share=mean(lambda one: one[1].is_good(SLO)),
        cached_share=mean(lambda one: one[2], lambda one: one[0].input_len),
        ttft_mean_s=mean(lambda one: one[1].ttft_s),
        ttft_p99_s=quantile(
            [seen.ttft_s for run in runs for _, seen, _ in run],
            np.repeat(weights, list(map(len, runs))),
            0.99,
        ),
    )


def whole(requests: Sequence[SimRequest]) -> list[Window]:
    return [whole_window(requests)]


def test_intervals_hold_what_the_whole_trace_comes_to() -> None:
    requests = list(scaled(load_trace()))
    truth = found_in(whole(requests))
    within: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    num_seeds, num_simulated = 12, 0
    for seed in range(num_seeds):
        windows = draw_windows(requests, cache_tokens=CACHE_TOKENS, window_s=20.0, tail_s=0.0, seed=seed)
        assert all(window.is_warm for window in windows) and len(windows) == 12
        num_simulated += sum(len(window.requests) for window in windows)
        found = found_in(windows)
        for name in FIGURES:
            true, estimate = getattr(truth, name).value, getattr(found, name)
            within[name] += estimate.low <= true <= estimate.high
            errors[name] += estimate.value / true - 1
            assert estimate.low < estimate.value < estimate.high
    assert num_simulated < 0.4 * num_seeds * len(requests), "it is worth it"
    assert min(within.values()) >= 9, within
    assert all(abs(errors[name] / num_seeds) < 0.05 for name in FIGURES), errors


def test_the_real_schedulers_agree() -> None:
    requests = list(islice(scaled(load_trace(), rate=6.0), 1000))
    windows = draw_windows(
        requests, cache_tokens=4 * POOL_TOKENS, num_windows=6, window_s=1.0, min_warmup_s=0.7, tail_s=0.3
    )
    assert sum(len(window.requests) for window in windows) < 0.8 * len(requests)
    truth, found = found_in(whole(requests), simulated), found_in(windows, simulated)
    for name in FIGURES:
        estimate = getattr(found, name)
        assert estimate.low <= getattr(truth, name).value <= estimate.high, (name, truth, found)


@pytest.mark.parametrize("seed", range(4))
def test_a_burst_is_kept(seed: int) -> None:
    """15 seconds of an hour have a tenth of the requests and nearly all of the slow ones."""
    rng = random.Random(seed)
    calm = unrelated(rng, 3600, gap_s=1.0, input_lens=(500, 2000))
    burst = [
        replace(one, at_s=2000 + one.at_s, blocks=tuple(10**6 + block for block in one.blocks))
        for one in unrelated(rng, 400, gap_s=15 / 400, input_lens=(500, 2000))
    ]
    requests = sorted([*calm, *burst], key=lambda one: one.at_s)
    windows = draw_windows(requests, cache_tokens=CACHE_TOKENS, window_s=30.0, tail_s=10.0, seed=seed)
    assert len(windows) == 12 and sum(len(window.requests) for window in windows) < len(requests) / 2
    in_burst = [
        one for window in windows for one in window.requests if window.counts(one) and one.blocks[0] >= 10**6
    ]
    assert len(in_burst) == 400
    truth, found = found_in(whole(requests)), found_in(windows)
    assert truth.good_share.value < 0.95
    assert found.good_share.value == pytest.approx(truth.good_share.value, abs=0.01)
    assert found.ttft_p99_s == pytest.approx(truth.ttft_p99_s, rel=0.05)


def test_a_short_trace_is_one_window_of_known_figures() -> None:
    requests = [replace(one, at_s=one.at_s + 50) for one in islice(scaled(load_trace()), 200)]
    (window,) = draw_windows(requests, cache_tokens=CACHE_TOKENS)
    assert (
        window.requests[0].at_s == 0
        and len(window.requests) == 200
        and all(map(window.counts, window.requests))
    )
    found = found_in([window])
    assert found.good_share.low == found.good_share.high == found.good_share.value
    (lone,) = draw_windows(requests[:1], cache_tokens=CACHE_TOKENS)
    assert lone.num_reqs == 1


def test_a_warmup_fills_the_caches_or_says_that_it_does_not() -> None:
    requests = list(scaled(load_trace(), scale=16))
    for longest, is_warm in ((1e9, True), (40.0, False)):
        windows = draw_windows(
            requests, cache_tokens=150_000, num_windows=3, window_s=10.0, max_warmup_s=longest, tail_s=5.0
        )
        for window in windows:
            warmup = [one for one in window.requests if one.at_s < window.counted_from_s]
            unique = {block for one in warmup for block in one.blocks}
            num_tokens = len(unique) * 32 + sum(one.output_len for one in warmup)
            starts_cold = window.requests[0].blocks == requests[0].blocks
            assert (num_tokens >= 150_000 or starts_cold) == window.is_warm == is_warm
            assert window.counted_from_s >= 30 or starts_cold
            assert window.requests[-1].at_s < window.counted_until_s + 5.0
