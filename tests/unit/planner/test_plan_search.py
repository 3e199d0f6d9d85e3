"""What a plan finds where the truth was planted: rates, the best fleet."""

from __future__ import annotations

import numpy as np
import pytest

from planner.candidate import Candidate
from planner.figures import Distribution, distribution
from planner.sample import Parts, Trial, difference, estimate
from planner.search import crossing
from tests.unit.planner.plan_rig import asked, planted, traffic


def pipeline(candidate: Candidate) -> float:
    """A prefill node serves 2 requests/s and a decode node 3; one that does both 1.1."""
    if not candidate.splits:
        return 1.1 * candidate.num_decode
    return min(2.0 * candidate.num_prefill, 3.0 * candidate.num_decode)


@pytest.mark.parametrize("rate", [0.1, 1.0, 20.0])
def test_the_highest_rates_come_back(rate: float) -> None:
    """A rate at which a tenth of the requests misses is 1 / 0.9 of what is served."""
    answer = planted(asked(of=traffic(200, rate=rate), nodes=range(1, 5)), pipeline)
    for one in answer.candidates:
        truth = pipeline(Candidate(num_prefill=one.num_prefill, num_decode=one.num_decode)) / 0.9
        assert one.max_rate is not None and one.max_rate.value == pytest.approx(truth, rel=0.03), one.name
        assert one.max_rate.low <= one.max_rate.value <= one.max_rate.high


def test_every_split_and_the_same_machines_together() -> None:
    answer = planted(asked(of=traffic(400), nodes=range(1, 4)), pipeline)
    assert [one.name for one in answer.candidates] == [
        "1 together", "1 together, mixed chunks",
        "2 together", "2 together, mixed chunks", "1P1D",
        "3 together", "3 together, mixed chunks", "1P2D", "2P1D",
    ]  # fmt: skip
    assert (answer.verdict.best, answer.verdict.tied_with) == ("1 together", ("1 together, mixed chunks",))
    two = planted(asked(of=traffic(400), nodes=range(2, 3)), pipeline).verdict
    assert (two.best, two.tied_with) == ("2 together", ("2 together, mixed chunks",)), (
        "1P1D serves 2, not 2.2"
    )


@pytest.mark.parametrize(
    ("rate", "best", "splits"), [(1.0, "1 together", False), (2.3, "3 together", False), (5.9, "3P2D", True)]
)
def test_the_fewest_nodes_that_meet_the_slos(rate: float, best: str, splits: bool) -> None:
    answer = planted(asked(of=traffic(100, rate=rate * 1.1), nodes=range(1, 6)), pipeline)
    assert (answer.verdict.best, answer.verdict.splits, answer.verdict.meets) == (best, splits, True)
    assert answer.verdict.headline.startswith("Split: " if splits else "Do not split: ")


@pytest.mark.parametrize(
    ("rate", "best"), [(1.0, "1 together"), (4.2, "4 together"), (6.4, "3P2D"), (20.0, "6 together")]
)
def test_every_trial_is_made_once(rate: float, best: str) -> None:
    made: list[Trial] = []
    answer = planted(asked(of=traffic(400, rate=rate), nodes=range(1, 7)), pipeline, made=made)
    assert answer.verdict.best == best
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (1.0, "The smallest split that meets the SLOs has 2 nodes: 1P1D serves"),
        (0.1, "No split meets the SLOs; the nearest has 4 nodes: "),
    ],
)
def test_the_split_beside_one_node_is_the_smallest_that_meets_the_slos(served: float, words: str) -> None:
    """No split has as many nodes, and one with more of them than are needed is no rival."""

    def fleets(candidate: Candidate) -> float:
        return served * candidate.num_nodes if candidate.splits else 2.0

    verdict = planted(asked(of=traffic(rate=1.0), nodes=range(1, 5)), fleets).verdict
    assert verdict.best == "1 together"
    assert any(reason.startswith(words) for reason in verdict.reasons), verdict.reasons


def test_a_fleet_that_meets_no_slo_says_by_how_much() -> None:
    answer = planted(asked(of=traffic(rate=100.0)), pipeline)
    assert not answer.verdict.meets
    assert "10.00 times as wide" in answer.verdict.headline, "5 s in place of 0.5 s"


@pytest.mark.parametrize(
    ("rate", "capacity", "is_short"), [(1.0, 5.0, False), (1.0, 20.0, True), (20.0, 5.0, True)]
)
def test_traffic_is_short_if_it_is_at_the_highest_rate(rate: float, capacity: float, is_short: bool) -> None:
    """A hundred requests: five a second last for 20 s, twenty for 5 s, and 20 SLOs on TTFT are 10 s.

    A fleet that serves less than the rate of the traffic has been tried at that rate as well.
    """
    answer = planted(asked(of=traffic(100, rate=rate), nodes=range(1, 2)), lambda *_: capacity)
    said = [remark for remark in answer.remarks if "the traffic lasts" in remark]
    assert [remark.startswith("At the highest rate of 1 together ") for remark in said] == [True] * is_short


# ---------------------------------------------------------------------------------------------- the statistics
def parts(*totals: float) -> Parts:
    """Ten requests each."""
    return Parts(np.array(totals), np.full(len(totals), 10.0))


def test_an_interval_is_students() -> None:
    one = estimate(parts(10.0, 20.0, 30.0))
    assert one.value == pytest.approx(2.0)
    assert one.high - one.value == pytest.approx(4.303 / 3**0.5, rel=1e-3), (
        "t at 97.5 % and two degrees of freedom"
    )
    assert estimate(parts(5.0)).low == 0.5


def test_what_both_have_in_common_is_no_noise() -> None:
    bursts = [1.0, 9.0, 2.0, 8.0]
    assert difference(parts(*(one + 0.5 for one in bursts)), parts(*bursts)).is_more_than_noise
    assert not difference(parts(*bursts), parts(*reversed(bursts))).is_more_than_noise


def test_percentiles_are_values() -> None:
    found = distribution([3.0, *[1.0] * 98, 2.0])
    assert found == Distribution(mean=1.03, p50=1.0, p90=1.0, p99=2.0)


def test_crossing() -> None:
    assert crossing([(1.0, 1.0), (4.0, 0.8)], 0.9) == pytest.approx(2.0), "halfway in the logarithm"
    assert crossing([(1.0, 1.0), (2.0, 0.5), (4.0, 0.95)], 0.9) == 4.0, "the last"
    assert crossing([(1.0, 0.5)], 0.9) is None
    assert crossing([(1.0, 0.9), (2.0, 0.0)], 0.9) == 1.0
