"""Plans over the real schedulers, with costs of which the right answer is known."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from planner import compare
from planner.answer import Answer
from planner.figures import Slo
from planner.profile import TransferCost
from planner.table import print_answer
from shared.errors import ConfigError
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
    assert [use.role for use in one.now.use] == ["together"] and one.now.transfer is None
    assert [use.role for use in split.now.use] == ["prefill", "decode"]
    assert split.now.transfer is not None and split.now.transfer.bytes_s > 1000
    assert one.now.ttft_s is not None and one.now.ttft_s.p50 == pytest.approx(0.002 + 256e-4, rel=0.2)
    assert one.difference is None and split.difference is not None
    assert one.max_rate is not None and one.max_rate.value > 5, "40 ms a request"


def test_a_slow_link_never_pays() -> None:
    slow = msgspec.structs.replace(PROFILE, transfer=TransferCost(latency_s=0.001, bytes_s=1e5))
    answer = planned(asked(slow, of=traffic(12, rate=8.0), nodes=range(2, 3)))
    assert not answer.verdict.splits and answer.verdict.headline.startswith("Do not split")
    assert {one.axis: one.pays for one in answer.thresholds} == {
        "prompt": "nowhere", "rate": "nowhere", "slo_ttft": "nowhere", "slo_itl": "nowhere"
    }  # fmt: skip


def test_a_link_whose_bandwidth_cannot_be_measured_is_a_link_of_its_latency() -> None:
    """Pages that take no time are as pages over a link so fast that they take a nanosecond."""
    answers = [
        planned(asked(msgspec.structs.replace(PROFILE, transfer=transfer), of=traffic(12), nodes=ONE_AND_TWO))
        for transfer in (
            TransferCost(latency_s=0.001, bytes_s=None),
            TransferCost(latency_s=0.001, bytes_s=1e15),
        )
    ]
    unmeasured, fastest = (answer.candidate("1P1D").now for answer in answers)
    assert unmeasured.transfer is not None and unmeasured.transfer.link_busy_share == 0.0
    assert unmeasured.ttft_s is not None and fastest.ttft_s is not None
    assert unmeasured.ttft_s.p50 == pytest.approx(fastest.ttft_s.p50)


def test_long_prompts_beside_short_streams_pay(stalled: Answer) -> None:
    assert (stalled.verdict.best, stalled.verdict.meets) == ("1P1D", True)
    together = stalled.candidate("2 together")
    assert together.now.good_share.value < 0.9
    assert together.now.bottleneck == "decode compute"
    assert stalled.verdict.best_of[0].splits and not stalled.verdict.best_of[0].tied_with
    assert "decode steps that take too long" in " ".join(stalled.verdict.reasons)


def test_an_itl_that_is_wide_enough_ends_what_splitting_pays_for(stalled: Answer) -> None:
    """Together, some requests meet two stalls, or three."""
    itl = next(one for one in stalled.thresholds if one.axis == "slo_itl")
    assert itl.pays == "between"
    assert itl.pays_from is not None and itl.pays_from < 0.028, "a decode step takes 20 ms"
    assert itl.pays_to is not None and 0.028 < itl.pays_to < 0.12
    assert itl.words.startswith("Splitting pays for SLOs on ITL from ")


def test_an_slo_that_no_fleet_can_meet_says_by_how_much() -> None:
    answer = planned(
        asked(costing(d=0.05), of=traffic(10, rate=0.1), slo=Slo(ttft_s=0.5, itl_s=0.01), nodes=ONE_AND_TWO)
    )
    assert (answer.verdict.best, answer.verdict.meets) == ("1 together", False), "the simplest of equals"
    now = answer.candidate("1 together").now
    assert now.slo_factor == pytest.approx(5.0, rel=0.1) and now.good_share.value == 0
    assert f"{now.slo_factor:.2f} times as wide" in answer.verdict.headline
    assert "over the SLO" in answer.verdict.headline and "TTFT" not in answer.verdict.headline
    assert answer.candidate("1 together").max_rate is None


def test_requests_beyond_the_context_fail_and_a_remark_says_so() -> None:
    short = msgspec.structs.replace(PROFILE, node=msgspec.structs.replace(PROFILE.node, context_length=128))
    answer = planned(asked(short, of=traffic(20), nodes=ONE_AND_TWO))
    assert answer.candidate("1 together").now.num_failed == 20
    assert "20 of 20 requests fail" in answer.verdict.headline
    assert any(
        "longer than the 128 tokens of context of profile0.json: 20." in remark for remark in answer.remarks
    )
    assert answer.candidate("1 together").now.ttft_s is None


def test_the_doubts_of_a_profile_are_those_of_the_answer() -> None:
    doubtful = msgspec.structs.replace(
        PROFILE, measured=msgspec.structs.replace(PROFILE.measured, remarks=("The machine was busy.",))
    )
    answer = planned(asked(doubtful, of=traffic(10, rate=10.0), nodes=range(1, 2)))
    assert "profile0.json: The machine was busy." in answer.remarks
    assert any("which is not long beside an SLO of 0.5 s" in remark for remark in answer.remarks), (
        "20 SLOs of 0.5 s are 10 s"
    )


def test_a_comparison_of_few_requests_is_doubtful() -> None:
    ways = tuple(compare.ways(compare.parse_fleet("1"), ["schedule-policy=fcfs,lpm"]))
    few, more = (planned(asked(of=traffic(num, rate=4.0), ways=ways)) for num in (10, 80))
    assert any(remark.startswith("The shortest window of the traffic lasts ") for remark in few.remarks)
    assert not more.remarks


def test_an_answer_is_json_that_can_be_read_back(stalled: Answer) -> None:
    text = stalled.to_json()
    assert msgspec.json.decode(text, type=Answer) == stalled
    assert msgspec.json.decode(text)["schema_version"] == 1


# --------------------------------------------------------------------------------------------------- --compare
def test_smaller_chunks_are_compared_on_the_same_requests() -> None:
    """Streams stall for a chunk at a time, and each chunk costs `a`."""
    slow = costing(a=0.02, b=2e-4)
    ways = compare.ways(
        compare.parse_fleet("1"), ["chunked-prefill-size=1024,128", "schedule-policy=fcfs,lpm"]
    )
    question = asked(slow, of=traffic(40, rate=2.0, input_len=1000), ways=tuple(ways), num_seeds=2)
    answer = planned(question)
    base = "chunked-prefill-size=1024 schedule-policy=fcfs"
    assert answer.base == base and answer.candidates[0].name == base
    assert len(answer.candidates) == 4 and {one.now.num_reqs for one in answer.candidates} == {80}
    small, order = (
        answer.candidate(f"chunked-prefill-size={size} schedule-policy={policy}").difference
        for size, policy in ((128, "fcfs"), (1024, "lpm"))
    )
    assert small is not None and order is not None
    assert small.is_more_than_noise and small.ttft_mean_s.low > 0.05, "seven more chunks of 20 ms"
    assert not order.is_more_than_noise, "no prompt shares a prefix"
    assert answer.verdict.reasons == ("2 of 3 differ from the base by more than noise.",)
    console = Console(width=160, file=io.StringIO(), record=True)
    print_answer(answer, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    told = {tuple(line[:2]): line[-1] for line in lines if line[1:2] in (["fcfs"], ["lpm"])}
    assert told == {
        ("1024", "fcfs"): "base", ("1024", "lpm"): "noise", ("128", "fcfs"): "differs", ("128", "lpm"): "differs"
    }  # fmt: skip
    assert answer.candidates[1].settings == {"chunked-prefill-size": "1024", "schedule-policy": "lpm"}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["schedule-policy=fcfs"], "1 combinations"),
        (["schedule-policy=fcfs,best"], "schedule-policy=best: it is one of fcfs, lpm"),
        (["prefill-policy=ttft,fcfs"], "prefill-policy=fcfs: it is one of ttft"),
        (["chunked-prefill-size=0,512"], "chunked-prefill-size=0: it is a whole number of tokens, at least 1"),
        (["local-prefill-tokens=auto,-1"], "at least 0, or auto"),
        (["max-prefill-tokens=1,2"], "knows no 'max-prefill-tokens'; it compares schedule-policy, prefill-policy"),
        (["schedule-policy=fcfs,fcfs"], "given twice"),
        (["schedule-policy=fcfs,lpm", "schedule-policy=fcfs,lpm"], "twice"),
        (["enable-mixed-chunk=yes,no"], "it is one of on, off"),
        ([f"chunked-prefill-size={','.join(map(str, range(1, 66)))}"], "65 combinations"),
    ],
)  # fmt: skip
def test_bad_comparisons(specs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compare.ways(compare.parse_fleet("1P1D"), specs)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "fleet", ["", "P", "2P", "0P1D", "1P0D", "2D", "2p2d", "1P1D1", "-3", "65", "60P10D"]
)
def test_bad_fleets(fleet: str) -> None:
    with pytest.raises(ConfigError, match="--fleet"):
        compare.parse_fleet(fleet)


def test_fleets_and_settings() -> None:
    fleet = compare.parse_fleet("2P3D")
    assert (fleet.num_prefill, fleet.num_decode) == (2, 3)
    assert compare.parse_fleet("5").num_decode == 5 and not compare.parse_fleet("5").splits
    one, other = compare.ways(fleet, ["local-prefill-tokens=0,auto"])
    assert (one.candidate.local_prefill_tokens, other.candidate.local_prefill_tokens) == (0, None)
    on = compare.ways(fleet, ["enable-mixed-chunk=off,on"])[1].candidate
    assert on.enable_mixed_chunk and on.num_prefill == 2
