"""A slow start names the stage that took longest beyond what it should cost; others name none."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import msgspec
import pytest

from router.dispatch.running_req import RunningReq
from router.dispatch.stages import Start, StartStage, worst_of
from shared.protocol.messages import (
    Finish,
    Load,
    ReqReport,
    Role,
    Stamp,
    Work,
)
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import IDS, SeenFleet

RATES = Load(prefill_tokens_per_s=4000.0, kv_bytes_per_s=2e9)
"""The 80 tokens of a prompt should take 20 ms then, and its 8 MB 4 ms."""


@dataclass(frozen=True, kw_only=True)
class Stays:
    """How long a sequence is in each stage. Decode nodes' clocks are ahead by `skew`, in seconds."""

    dispatch: float = 0.0
    reservation: float = 0.001
    fetch: float = 0.0
    num_fetched: int = 0
    queue: float = 0.002
    prefill: float = 0.02
    ahead: float = 0.0
    """Of the reservation: while the prompt was computed ahead."""
    delivery: float = 0.001
    transfer: float = 0.004
    skew: float = 0.0


USUAL = Stays()


def stamps(role: str, at: float, *stages: tuple[str, float]) -> tuple[Stamp, ...]:
    """Stages with the seconds that each was stayed in."""
    entered = []
    for stage, seconds in stages:
        entered.append(Stamp(role, stage, at))
        at += seconds
    return tuple(entered)


def serve(fleet: SeenFleet, stays: Stays = USUAL) -> RunningReq:
    """One sequence through both fleets, to its end."""
    work = Work(IDS, SamplingParams(max_new_tokens=2))
    req = fleet.dispatcher.start(work, lambda: None, waited_s=stays.dispatch)
    finish(fleet, req, stays)
    return req


def finish(fleet: SeenFleet, req: RunningReq, stays: Stays) -> None:
    prefill, decode = req.nodes
    sent_at = fleet.now
    fleet.now += stays.reservation + stays.fetch + stays.queue + stays.prefill + stays.delivery
    of_prefill = stamps(
        Role.PREFILL,
        sent_at,
        ("queued", stays.reservation + stays.fetch + stays.queue),
        ("prefilling", stays.prefill),
        ("transferring", 0.0),
    )
    fetch_s = stays.reservation + stays.fetch if stays.fetch else 0.0
    told = ReqReport(
        stamps=of_prefill, ahead_s=stays.ahead, fetch_s=fetch_s, num_fetched_tokens=stays.num_fetched
    )
    fleet.tell(req, 7, by=prefill, report=told)
    assert req.start is None, "what the decode node does is not known yet"
    fleet.now += stays.transfer
    of_decode = stamps(
        Role.DECODE,
        sent_at + stays.skew,
        ("queued", stays.reservation),
        ("transferring", stays.fetch + stays.queue + stays.prefill + stays.transfer),
        ("decoding", 0.0),
    )
    report = ReqReport(stamps=(*of_prefill, *of_decode), kv_bytes_transferred=8_000_000)
    fleet.tell(req, 7, 8, by=decode, at=0, finish=Finish("length"), report=report)


def start_of(req: RunningReq) -> Start:
    assert req.start is not None
    return req.start


def seconds_of(start: Start) -> dict[StartStage, float]:
    return {stage.stage: stage.seconds for stage in start.stages}


def measured_fleet(num_decode: int = 1) -> SeenFleet:
    """A fleet whose nodes have measured their rates."""
    fleet = SeenFleet(num_decode, local_prefill_tokens=0)
    for node in fleet.nodes:
        node.load = RATES
    return fleet


DELAYS = {
    StartStage.DISPATCH: {"dispatch": 0.3},
    StartStage.RESERVATION: {"reservation": 0.212},
    StartStage.FETCH: {"fetch": 0.3},
    StartStage.QUEUE: {"queue": 0.4},
    StartStage.PREFILL: {"prefill": 0.5},
    StartStage.DELIVERY: {"delivery": 0.6},
    StartStage.TRANSFER: {"transfer": 0.7},
}


def test_a_start_that_costs_what_it_should_is_not_slow() -> None:
    start = start_of(serve(measured_fleet()))
    assert start.slow_because is None
    assert start.ttft_s == pytest.approx(0.024)
    assert [stage.stage for stage in start.stages] == [
        stage for stage in StartStage if stage is not StartStage.FETCH
    ]
    assert sum(stage.seconds for stage in start.stages[:-1]) == pytest.approx(start.ttft_s)
    expected = {stage.stage: stage.expected_s for stage in start.stages if stage.expected_s}
    assert expected == pytest.approx({StartStage.PREFILL: 0.02, StartStage.TRANSFER: 0.004})


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0], ids=["one clock", "ahead", "behind"])
@pytest.mark.parametrize("stage", DELAYS, ids=str)
def test_the_stage_that_was_delayed_is_named(stage: StartStage, skew: float) -> None:
    start = start_of(serve(measured_fleet(), replace(USUAL, skew=skew, **DELAYS[stage])))  # type: ignore[arg-type]
    assert start.slow_because is stage


@pytest.mark.parametrize(("worse", "other"), list(itertools.permutations(DELAYS, 2)), ids=str)
def test_of_two_delays_the_longer_is_named(worse: StartStage, other: StartStage) -> None:
    (longer,), (shorter,) = DELAYS[worse], DELAYS[other]
    stays = replace(USUAL, **{longer: 1.1, shorter: 0.4})  # type: ignore[arg-type]
    assert start_of(serve(measured_fleet(), stays)).slow_because is worse


@pytest.mark.parametrize(
    ("prefill", "slow"),
    [(0.039, None), (0.069, None), (0.071, StartStage.PREFILL), (0.2, StartStage.PREFILL)],
)
def test_an_excess_counts_from_50_ms_and_half_of_the_stage_on(
    prefill: float, slow: StartStage | None
) -> None:
    assert start_of(serve(measured_fleet(), replace(USUAL, prefill=prefill))).slow_because is slow


def test_less_than_half_of_a_long_stage_is_no_excess() -> None:
    fleet = measured_fleet()
    fleet.prefills[0].load = replace_rate(RATES, 80.0)
    assert start_of(serve(fleet, replace(USUAL, prefill=1.9))).slow_because is None
    assert start_of(serve(fleet, replace(USUAL, prefill=2.1))).slow_because is StartStage.PREFILL


def test_a_slow_stage_is_named_behind_a_longer_one_that_is_not_slow() -> None:
    fleet = measured_fleet()
    fleet.prefills[0].load = replace_rate(RATES, 80.0)
    assert start_of(serve(fleet, replace(USUAL, prefill=1.8, queue=0.5))).slow_because is StartStage.QUEUE


def replace_rate(load: Load, tokens_per_s: float) -> Load:
    return msgspec.structs.replace(load, prefill_tokens_per_s=tokens_per_s)


@pytest.mark.parametrize(
    "queue", [0.0, 0.01], ids=["within the reservation", "the last chunk ends behind it"]
)
def test_a_prompt_that_was_computed_ahead_would_have_been_computed_anyway(queue: float) -> None:
    """Its time counts as prefill, and the wait is what was beyond it."""
    stays = replace(USUAL, reservation=0.212, queue=queue, prefill=0.004, ahead=0.016)
    start = start_of(serve(measured_fleet(), stays))
    stages = seconds_of(start)
    assert stages[StartStage.PREFILL] == pytest.approx(0.02)
    assert stages[StartStage.QUEUE] == pytest.approx(0.0)
    assert stages[StartStage.RESERVATION] == pytest.approx(0.196 + queue)
    assert start.slow_because is StartStage.RESERVATION


def test_a_fetch_should_cost_what_computing_the_same_tokens_would() -> None:
    fleet = measured_fleet()
    fetching = replace(USUAL, fetch=0.1, num_fetched=400)
    assert start_of(serve(fleet, fetching)).slow_because is None
    assert start_of(serve(fleet, replace(fetching, fetch=0.5))).slow_because is StartStage.FETCH
    assert start_of(serve(fleet, replace(fetching, num_fetched=0))).slow_because is StartStage.FETCH, (
        "in vain"
    )


def test_a_fetch_beside_the_reservation_counts_from_its_end() -> None:
    start = start_of(serve(measured_fleet(), replace(USUAL, reservation=0.2, fetch=0.01, queue=0.4)))
    seconds = seconds_of(start)
    assert seconds[StartStage.FETCH] == pytest.approx(0.01)
    assert start.slow_because is StartStage.QUEUE


def test_a_fetch_beside_a_chunk_ahead_counts_once() -> None:
    start = start_of(serve(measured_fleet(), replace(USUAL, reservation=0.25, fetch=0.05, ahead=0.3)))
    assert min(stage.seconds for stage in start.stages) >= 0
    assert sum(stage.seconds for stage in start.stages[:-1]) == pytest.approx(start.ttft_s)


def test_a_stage_without_a_known_rate_makes_nothing_slow() -> None:
    fleet = SeenFleet(1, local_prefill_tokens=0)
    slow = replace(USUAL, prefill=5.0, transfer=5.0)
    start = start_of(serve(fleet, slow))
    assert start.slow_because is None
    assert {s.stage for s in start.stages if s.expected_s is None} == {
        StartStage.PREFILL,
        StartStage.TRANSFER,
    }
    assert start_of(serve(fleet, replace(slow, queue=2.0))).slow_because is StartStage.QUEUE


def test_a_failover_before_the_first_token_is_named() -> None:
    fleet = measured_fleet(2)
    req = fleet.dispatcher.start(Work(IDS, SamplingParams(max_new_tokens=2)), lambda: None)
    fleet.now += 0.8
    fleet.kill(req.nodes[-1])
    finish(fleet, req, USUAL)
    start = start_of(req)
    worst = worst_of(start.stages)
    assert worst is not None
    assert (start.slow_because, worst.seconds) == (StartStage.FAILOVER, pytest.approx(0.8))


def start_at_decode_node(total_s: float, *stays: tuple[str, float]) -> Start:
    """Of a prompt that the decode node computes by itself."""
    fleet = SeenFleet(1, local_prefill_tokens=10_000)
    fleet.decodes[0].load = RATES
    req = fleet.start(max_new_tokens=2)
    fleet.now += total_s
    report = ReqReport(stamps=stamps(Role.DECODE, 5.0, *stays, ("decoding", 0.0)))
    fleet.tell(req, 7, 8, finish=Finish("length"), report=report)
    return start_of(req)


def test_a_prompt_that_its_decode_node_computes_has_no_reservation() -> None:
    start = start_at_decode_node(0.32, ("queued", 0.3), ("prefilling", 0.02))
    assert [stage.stage for stage in start.stages] == ["dispatch", "failover", "queue", "prefill", "delivery"]
    assert start.slow_because is StartStage.QUEUE


def test_a_prompt_that_was_retracted_counts_its_first_stay_in_each_stage() -> None:
    stays = (("queued", 0.3), ("prefilling", 0.02), ("retracted", 0.5), ("prefilling", 0.08))
    seconds = seconds_of(start_at_decode_node(0.9, *stays))
    assert seconds[StartStage.PREFILL] == pytest.approx(0.02)
    assert seconds[StartStage.DELIVERY] == pytest.approx(0.58)


def test_the_metric_counts_slow_starts_by_stage() -> None:
    fleet = measured_fleet()
    for stays in (USUAL, replace(USUAL, queue=1.0), replace(USUAL, queue=2.0)):
        serve(fleet, stays)
    samples = fleet.metric("baton:num_slow_starts").samples
    counted = {s.labels["slow_because"]: s.value for s in samples if s.name.endswith("_total") and s.value}
    assert counted == {"queue": 2.0}
