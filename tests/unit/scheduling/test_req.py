"""Progress is arithmetic: lengths, and the moves of a request's stages."""

from __future__ import annotations

from itertools import product

import pytest

from shared.protocol.messages import Finish, Role
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.timeline import ALLOWED_MOVES, ReqStage, Timeline
from tests.unit.scheduling.conftest import MakeLedger, MakeReq


def test_scheduling_moves_the_arithmetic_at_once(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(10, max_new_tokens=3)
    req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    assert not req.is_in_flight
    first = schedule(req, 6, samples=False)
    assert req.is_in_flight, "a chunk that samples nothing as well"
    second = schedule(req, 4, samples=True)
    third = schedule(req, 1, samples=True)
    assert [(item.start, item.length, item.position) for item in (first, second, third)] == [
        (0, 6, None),
        (6, 4, 0),
        (10, 1, 1),
    ]
    assert (req.kv_len, req.num_sampled, req.output_len, req.num_wanted) == (11, 2, 0, 1)
    assert ScheduleBatch(extends=(first, second, third)).num_tokens == 11


def test_a_request_wants_decode_until_its_last_token_is_asked_for(make_req: MakeReq) -> None:
    req = make_req(4, max_new_tokens=2)
    assert req.wants_decode
    req.num_sampled = 2
    assert not req.wants_decode
    req.num_sampled = 1
    req.end(Finish("stop", 7))
    assert not req.wants_decode


def test_a_retraction_makes_results_in_flight_stale(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(4, output_ids=(1, 2))
    req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    before = schedule(req, 6, samples=True)
    assert req.num_sampled == 3
    req.drop_results_in_flight()
    assert before.is_stale
    assert req.num_sampled == 2
    assert not schedule(req, 6, samples=True).is_stale


def test_an_ended_request_is_ended_once(make_req: MakeReq) -> None:
    req = make_req()
    req.end(Finish("stop", 7))
    req.end(Finish("abort"))
    assert [stamp.stage for stamp in req.timeline.stamps] == ["queued", "finished"]


def test_without_kv_nothing_is_computed(make_req: MakeReq) -> None:
    assert make_req().kv_len == 0


def test_the_report_names_what_happened(make_req: MakeReq) -> None:
    req = make_req()
    req.cached_tokens, req.num_retractions = 5, 2
    req.kv_pages_transferred, req.kv_bytes_transferred = 3, 96
    req.timeline.move_to(ReqStage.PREFILLING)
    report = req.report()
    assert (report.cached_tokens, report.num_retractions) == (5, 2)
    assert (report.kv_pages_transferred, report.kv_bytes_transferred) == (3, 96)
    assert [(stamp.role, stamp.stage) for stamp in report.stamps] == [
        ("decode", "queued"),
        ("decode", "prefilling"),
    ]


@pytest.mark.parametrize(("before", "after"), list(product(ReqStage, ReqStage)), ids=str)
def test_stages_move_as_the_life_of_a_request_allows(before: ReqStage, after: ReqStage) -> None:
    timeline = Timeline(Role.DECODE, stage=before)
    if after in ALLOWED_MOVES[before]:
        timeline.move_to(after)
        assert timeline.stage is after
        assert timeline.stamps[-1].time >= timeline.stamps[0].time
    else:
        with pytest.raises(AssertionError, match=f"{before} -> {after}"):
            timeline.move_to(after)
        assert timeline.stage is before


def test_every_stage_can_end_except_the_end() -> None:
    assert all(
        ReqStage.FINISHED in ALLOWED_MOVES[stage] for stage in ReqStage if stage is not ReqStage.FINISHED
    )
    assert not ALLOWED_MOVES[ReqStage.FINISHED]
