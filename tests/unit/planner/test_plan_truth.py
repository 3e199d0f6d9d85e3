"""Plans over the real schedulers, with costs of which the right answer is known."""

from __future__ import annotations

import msgspec
import pytest

from planner.answer import Answer
from planner.figures import Slo
from planner.profile import TransferCost
from tests.unit.planner.plan_rig import PROFILE, asked, costing, planned, traffic

ONE_AND_TWO = range(1, 3)
STALLING = costing(b=5e-4, d=0.02)
"""A prompt of 800 tokens takes 400 ms. Of 20 gaps between tokens, that is 20 ms more in the mean for each stall."""
STALLED = traffic(16, rate=1.8, input_len=800, output_len=21)
STALL_SLO = Slo(ttft_s=3.0, itl_s=0.028)


@pytest.fixture(scope="module")
def stalled() -> Answer:
    return planned(asked(STALLING, of=STALLED, slo=STALL_SLO, nodes=range(2, 3)))


def test_one_node_is_enough_for_little_traffic() -> None:
    answer = planned(asked(of=traffic(12), nodes=ONE_AND_TWO))
    assert (answer.verdict.best, answer.verdict.splits, answer.verdict.meets) == ("1 together", False, True)
    one, split = answer.candidate("1 together"), answer.candidate("1P1D")
    assert list(one.now.busy) == ["together", "router"] and one.now.transfer_bytes_s == 0
    assert list(split.now.busy) == ["prefill", "decode", "link", "router"]
    assert split.now.transfer_bytes_s > 1000
    assert one.now.ttft_s is not None and one.now.ttft_s.p50 == pytest.approx(0.002 + 256e-4, rel=0.2)
    assert one.max_rate is not None and one.max_rate.value > 5, "40 ms a request"


def test_a_slow_link_never_pays() -> None:
    slow = msgspec.structs.replace(PROFILE, transfer=TransferCost(latency_s=0.001, bytes_s=1e5))
    answer = planned(asked(slow, of=traffic(12, rate=8.0), nodes=range(2, 3)))
    assert not answer.verdict.splits and answer.verdict.headline.startswith("Do not split")


def test_long_prompts_beside_short_streams_pay(stalled: Answer) -> None:
    assert (stalled.verdict.best, stalled.verdict.meets) == ("1P1D", True)
    together = stalled.candidate("2 together")
    assert together.now.good_share.value < 0.9
    assert together.now.bottleneck == "decode compute"
    assert stalled.verdict.splits and not stalled.verdict.tied_with
    assert "What holds it back there: decode compute." in " ".join(stalled.verdict.reasons)


def test_an_slo_that_no_fleet_can_meet_says_by_how_much() -> None:
    answer = planned(
        asked(costing(d=0.05), of=traffic(10, rate=0.1), slo=Slo(ttft_s=0.5, itl_s=0.01), nodes=ONE_AND_TWO)
    )
    assert (answer.verdict.best, answer.verdict.meets) == ("1 together", False), "the simplest of equals"
    now = answer.candidate("1 together").now
    assert now.slo_factor == pytest.approx(5.0, rel=0.1) and now.good_share.value == 0
    assert f"{now.slo_factor:.2f} times as wide" in answer.verdict.headline
    assert answer.candidate("1 together").max_rate is None


def test_requests_beyond_the_context_fail_and_a_remark_says_so() -> None:
    short = msgspec.structs.replace(PROFILE, node=msgspec.structs.replace(PROFILE.node, context_length=128))
    answer = planned(asked(short, of=traffic(20), nodes=ONE_AND_TWO))
    assert answer.candidate("1 together").now.num_failed == 20
    assert "20 of 20 requests fail" in answer.verdict.headline
    assert any(
        remark.startswith("20 requests fail on every node") and "128 tokens" in remark
        for remark in answer.remarks
    )
    assert answer.candidate("1 together").now.ttft_s is None


def test_the_doubts_of_a_profile_are_those_of_the_answer() -> None:
    doubtful = msgspec.structs.replace(
        PROFILE, measured=msgspec.structs.replace(PROFILE.measured, remarks=("The machine was busy.",))
    )
    answer = planned(asked(doubtful, of=traffic(10, rate=10.0), nodes=range(1, 2)))
    assert "profile.json: The machine was busy." in answer.remarks
    assert any("which is not long beside an SLO of 0.5 s" in remark for remark in answer.remarks), (
        "20 SLOs of 0.5 s are 10 s"
    )


def test_an_answer_is_json_that_can_be_read_back(stalled: Answer) -> None:
    text = stalled.to_json()
    assert msgspec.json.decode(text, type=Answer) == stalled
    assert msgspec.json.decode(text)["schema_version"] == 4
