"""The verdict on a slow start names the stage, its node and its cause; a start as usual has none."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import pytest

from router.dispatch.dispatcher import Loss
from router.dispatch.running_req import RunningReq
from router.dispatch.usual import UsualDurations
from router.dispatch.verdict import Start, StartStage, worst_of
from shared.protocol.messages import (
    Finish,
    LinkReport,
    Load,
    ReqReport,
    Role,
    Stamp,
    TokenEntry,
    WaitedFor,
    Work,
)
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import IDS, Fleet

FULL = Load(num_pages=4000, num_free_pages=2, num_evictable_pages=1)
SLOW_LINK = Load(num_pages=4000, links=(LinkReport("p0#1", True, "tcp", gb_s=1.25),))


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
    waited_for: str = ""


USUAL = Stays()


def stamps(role: str, at: float, *stages: tuple[str, float]) -> tuple[Stamp, ...]:
    """Stages with the seconds that each was stayed in."""
    entered = []
    for stage, seconds in stages:
        entered.append(Stamp(role, stage, at))
        at += seconds
    return tuple(entered)


def serve(fleet: Fleet, stays: Stays = USUAL) -> RunningReq:
    """One sequence through both fleets, to its end."""
    work = Work(IDS, SamplingParams(max_new_tokens=2))
    req = fleet.dispatcher.start(work, lambda: None, waited_s=stays.dispatch)
    finish(fleet, req, stays)
    return req


def finish(fleet: Fleet, req: RunningReq, stays: Stays) -> None:
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
    first = TokenEntry(req.key, 0, (7,), None, told)
    fleet.dispatcher.on_tokens(prefill, [first])
    assert req.start is None, "what the decode node does is not known yet"
    fleet.now += stays.transfer
    of_decode = stamps(
        Role.DECODE,
        sent_at + stays.skew,
        ("queued", stays.reservation),
        ("transferring", stays.fetch + stays.queue + stays.prefill + stays.transfer),
        ("decoding", 0.0),
    )
    report = ReqReport(
        stamps=(*of_prefill, *of_decode), kv_bytes_transferred=8_000_000, waited_for=stays.waited_for
    )
    fleet.dispatcher.on_tokens(decode, [TokenEntry(req.key, 0, (7, 8), Finish("length"), report)])


def start_of(req: RunningReq) -> Start:
    assert req.start is not None
    return req.start


def fleet_with_habits(num_decode: int = 1) -> Fleet:
    """A fleet of which the router knows what is usual."""
    fleet = Fleet(num_decode, local_prefill_tokens=0)
    for _ in range(4 * num_decode):
        assert start_of(serve(fleet)).verdict is None
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


def test_a_start_as_usual_has_no_verdict() -> None:
    start = start_of(serve(fleet_with_habits()))
    assert start.verdict is None
    assert start.ttft_s == pytest.approx(0.024) and start.usual_s == pytest.approx(0.021)
    assert [stage.stage for stage in start.stages] == [
        stage for stage in StartStage if stage not in (StartStage.TURN, StartStage.FETCH)
    ]
    assert sum(stage.seconds for stage in start.stages[:-1]) == pytest.approx(start.ttft_s)


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0], ids=["one clock", "ahead", "behind"])
@pytest.mark.parametrize("stage", DELAYS, ids=str)
def test_the_stage_that_was_delayed_is_named(stage: StartStage, skew: float) -> None:
    fleet = fleet_with_habits()
    start = start_of(serve(fleet, replace(USUAL, skew=skew, **DELAYS[stage])))  # type: ignore[arg-type]
    assert start.verdict is not None
    assert [cause.stage for cause in start.verdict.causes] == [stage]
    assert start.verdict.without_s == pytest.approx(0.024, abs=0.004)


@pytest.mark.parametrize(
    "queue", [0.0, 0.01], ids=["within the reservation", "the last chunk ends behind it"]
)
def test_a_prompt_that_was_computed_ahead_would_have_been_computed_anyway(queue: float) -> None:
    """Its time counts as prefill, so the usual of the node stays right, and the wait is what was beyond it."""
    fleet = fleet_with_habits()
    stays = replace(USUAL, reservation=0.212, queue=queue, prefill=0.004, ahead=0.016)
    for _ in range(16):
        start = start_of(serve(fleet, stays))
        stages = {stage.stage: stage for stage in start.stages}
        prefill = stages[StartStage.PREFILL]
        assert (prefill.seconds, prefill.usual_s) == (pytest.approx(0.02), pytest.approx(0.02))
        assert stages[StartStage.QUEUE].seconds == pytest.approx(0.0)
        assert stages[StartStage.RESERVATION].seconds == pytest.approx(0.196 + queue)
        assert start.verdict is not None and start.verdict.without_s == pytest.approx(0.021)
    assert start_of(serve(fleet)).verdict is None


@pytest.mark.parametrize(("worse", "other"), list(itertools.permutations(DELAYS, 2)), ids=str)
def test_of_two_delays_the_longer_is_named_first(worse: StartStage, other: StartStage) -> None:
    (longer,), (shorter,) = DELAYS[worse], DELAYS[other]
    stays = replace(USUAL, **{longer: 1.1, shorter: 0.4})  # type: ignore[arg-type]
    verdict = start_of(serve(fleet_with_habits(), stays)).verdict
    assert verdict is not None
    assert [cause.stage for cause in verdict.causes] == [worse, other]
    assert verdict.without_s == pytest.approx(0.024, abs=0.004)


def test_a_fetch_that_brings_pages_has_a_usual_time() -> None:
    fleet = fleet_with_habits()
    fetching = replace(USUAL, fetch=0.1, num_fetched=64)
    for _ in range(5):
        assert start_of(serve(fleet, fetching)).verdict is None
    verdict = start_of(serve(fleet, replace(fetching, fetch=0.5))).verdict
    assert verdict is not None
    words = "500 ms waiting for pages that another node was to lend to p0, where 100 ms is usual; without that 124 ms"
    assert verdict.text == words
    verdict = start_of(serve(fleet, replace(fetching, num_fetched=0))).verdict
    assert verdict is not None and "lend to p0, in vain; without that 24 ms" in verdict.text


def test_a_fetch_beside_a_chunk_ahead_counts_once() -> None:
    start = start_of(serve(fleet_with_habits(), replace(USUAL, reservation=0.25, fetch=0.05, ahead=0.3)))
    assert min(stage.seconds for stage in start.stages) >= 0
    assert sum(stage.seconds for stage in start.stages[:-1]) == pytest.approx(start.ttft_s)


def test_the_words_tell_node_cause_and_what_it_would_have_been() -> None:
    fleet = fleet_with_habits()
    fleet.decodes[0].load = FULL
    full = replace(USUAL, reservation=0.212, waited_for=WaitedFor.PAGES)
    verdict = start_of(serve(fleet, full)).verdict
    assert verdict is not None
    assert verdict.text == (
        "212 ms waiting for pages on d000, which is full (3 of 4,000 pages were free for a prompt of 5); "
        "with a free decode node 23 ms"
    )
    fleet.prefills[0].load = Load(num_waiting=3, num_running=1)
    verdict = start_of(serve(fleet, replace(full, queue=1.5, waited_for=WaitedFor.ROWS))).verdict
    assert verdict is not None
    assert verdict.text == (
        "1.50 s waiting in the queue of p0, where 4 requests waited or ran and "
        "212 ms waiting for a place on d000, which runs 64 requests at most; without both 21 ms"
    )
    fleet.prefills[0].load = Load(num_waiting=3, num_running=1, num_queued_tokens=12_000)
    verdict = start_of(serve(fleet, replace(USUAL, queue=1.5))).verdict
    assert verdict is not None
    assert verdict.text == (
        "1.50 s waiting in the queue of p0, where 12,000 prompt tokens were to be computed; with a free p0 22 ms"
    )
    fleet.decodes[0].load = SLOW_LINK
    verdict = start_of(serve(fleet, replace(USUAL, prefill=0.4, transfer=2.0))).verdict
    assert verdict is not None
    assert verdict.text == (
        "2.00 s between the first token and the second for 8.0 MB of KV from p0 to d000 over tcp (rehearsed at "
        "1.2 GB/s), where 4 ms is usual and 400 ms computing 80 tokens on p0, at 200 tokens/s where 4,000 are "
        "usual; at the usual speed of p0 24 ms"
    )


def test_requests_that_resume_are_a_cause_too() -> None:
    fleet = fleet_with_habits()
    slow = replace(USUAL, reservation=0.5, waited_for=WaitedFor.ORDER)
    verdict = start_of(serve(fleet, slow)).verdict
    assert verdict is not None
    assert "500 ms waiting for pages on d000, behind requests that had given up their pages" in verdict.text


def test_a_wait_that_was_for_neither_pages_nor_rows_is_not_said_to_be() -> None:
    verdict = start_of(serve(fleet_with_habits(), replace(USUAL, reservation=0.5))).verdict
    assert verdict is not None
    assert verdict.text.startswith("500 ms waiting for d000 to take it; with a free decode node")


def test_of_several_sequences_the_one_that_lost_most_time_is_told() -> None:
    """And not the one with the latest first token, which may be as late as usual."""
    fleet = fleet_with_habits()
    waited = start_of(serve(fleet, replace(USUAL, queue=0.6)))
    slow_link = start_of(serve(fleet, replace(USUAL, transfer=2.0)))
    usual = start_of(serve(fleet, USUAL))
    assert slow_link.ttft_s < waited.ttft_s
    rid, verdict = worst_of({"1": usual, "2": slow_link, "3": waited})
    assert rid == "2" and verdict is not None and verdict.text.startswith("2.00 s between the first token")
    assert worst_of({"1": usual}) == worst_of({}) == (None, None)


def test_what_is_unknown_is_no_verdict() -> None:
    fleet = Fleet(1, local_prefill_tokens=0)
    slow = replace(USUAL, prefill=5.0, transfer=5.0)
    start = start_of(serve(fleet, slow))
    assert start.verdict is None and start.usual_s is None
    assert {s.stage for s in start.stages if s.usual_s is None} == {
        StartStage.PREFILL,
        StartStage.DELIVERY,
        StartStage.TRANSFER,
    }
    # A wait is known to be one: it takes no time on a free node.
    verdict = start_of(serve(fleet, replace(slow, queue=8.0))).verdict
    assert verdict is not None and [cause.stage for cause in verdict.causes] == [StartStage.QUEUE]


def test_a_node_that_is_gone_has_no_habits() -> None:
    fleet = fleet_with_habits()
    fleet.dispatcher.on_node_lost(fleet.prefills[0], "gone", Loss.LEFT)
    assert start_of(serve(fleet, replace(USUAL, prefill=5.0))).verdict is None


def test_a_failover_before_the_first_token_is_named() -> None:
    fleet = fleet_with_habits(2)
    req = fleet.dispatcher.start(Work(IDS, SamplingParams(max_new_tokens=2)), lambda: None)
    lost = next(node for node in fleet.decodes if node is req.nodes[-1])
    fleet.now += 0.8
    fleet.decodes.remove(lost)
    fleet.dispatcher.on_node_lost(lost, "the process ended", Loss.CRASHED)
    finish(fleet, req, USUAL)
    verdict = start_of(req).verdict
    assert verdict is not None
    assert verdict.text.startswith(
        f"800 ms lost with an attempt that failed, since decode node {lost.ref.node_id} was lost: "
    )
    assert verdict.text.endswith("; without the failover 24 ms")


def test_a_prompt_that_its_decode_node_computes_has_no_reservation() -> None:
    fleet = Fleet(1, local_prefill_tokens=10_000)

    def serve_locally(queued_s: float) -> Start:
        req = fleet.start(max_new_tokens=1 + 1)
        (decode,) = req.nodes
        fleet.now += queued_s + 0.02
        stays = (("queued", queued_s), ("prefilling", 0.02), ("decoding", 0.0))
        report = ReqReport(stamps=stamps(Role.DECODE, 5.0, *stays))
        fleet.dispatcher.on_tokens(decode, [TokenEntry(req.key, 0, (7, 8), Finish("length"), report)])
        return start_of(req)

    assert all(serve_locally(0.001).verdict is None for _ in range(4))
    start = serve_locally(0.3)
    assert [stage.stage for stage in start.stages] == ["dispatch", "failover", "queue", "prefill", "delivery"]
    assert start.verdict is not None
    assert re.fullmatch(r"300 ms waiting in the queue of d000; with a free d000 20 ms", start.verdict.text)


def test_an_incident_is_not_the_usual_at_once() -> None:
    usual = UsualDurations()
    for at in range(100):
        usual.observe(("prefill", "p"), 1000, 0.1, at * 20.0)
    for at in range(1000):  # a second of slow requests
        usual.observe(("prefill", "p"), 1000, 9.0, 2000.0 + at / 1000)
    assert usual.usual_s(("prefill", "p"), 1000) == pytest.approx(0.1)
    assert usual.usual_s(("prefill", "p"), 600) == pytest.approx(0.06)
    assert usual.usual_s(("prefill", "p"), 2000) is None, "of another size"
    for at in range(16):
        usual.observe(("prefill", "p"), 1000, 9.0, 3000.0 + at * 20.0)
    assert usual.usual_s(("prefill", "p"), 1000) == pytest.approx(9.0)


def test_a_turn_among_the_api_keys_is_named() -> None:
    fleet = fleet_with_habits()
    work = Work(IDS, SamplingParams(max_new_tokens=2))
    greedy = [fleet.dispatcher.start(work, lambda: None, api_key=1) for _ in range(20)]
    late = fleet.dispatcher.start(work, lambda: None, api_key=2)
    assert not late.nodes
    fleet.now += 0.5
    finish(fleet, greedy[0], USUAL)
    finish(fleet, late, USUAL)
    verdict = start_of(late).verdict
    assert verdict is not None
    assert [cause.stage for cause in verdict.causes] == [StartStage.TURN]
    assert re.fullmatch(
        r"5\d\d ms waiting for its turn among the API keys; without other keys \d\d ms", verdict.text
    )
