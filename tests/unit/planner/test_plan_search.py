"""What a plan finds where the truth was planted: rates, the best fleet, thresholds, another load."""

from __future__ import annotations

import numpy as np
import pytest

from planner.answer import Answer, Threshold
from planner.candidate import Candidate
from planner.figures import Distribution, distribution
from planner.sample import Parts, Trial, Variation, difference, estimate
from planner.search import crossing
from planner.traffic.trace import SimRequest
from tests.unit.planner.plan_rig import asked, planned, planted, traffic


def pipeline(candidate: Candidate, varied: Variation) -> float:
    """A prefill node serves 2 requests/s and a decode node 3; one that does both 1.1."""
    if not candidate.splits:
        return 1.1 * candidate.num_decode
    return min(2.0 * candidate.num_prefill, 3.0 * candidate.num_decode)


def threshold(answer: Answer, axis: str) -> Threshold:
    return next(one for one in answer.thresholds if one.axis == axis)


@pytest.mark.parametrize("rate", [0.1, 1.0, 20.0])
def test_the_highest_rates_come_back(rate: float) -> None:
    """A rate at which a tenth of the requests misses is 1 / 0.9 of what is served."""
    answer = planted(asked(of=traffic(200, rate=rate), nodes=range(1, 5)), pipeline)
    for one in answer.candidates:
        truth = pipeline(Candidate(num_prefill=one.num_prefill, num_decode=one.num_decode), Variation()) / 0.9
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
    answer = planted(asked(of=traffic(100, rate=rate * 1.1, windows=2), nodes=range(1, 6)), pipeline)
    assert (answer.verdict.best, answer.verdict.splits, answer.verdict.meets) == (best, splits, True)
    assert answer.verdict.headline.startswith("Split: " if splits else "Do not split: ")


@pytest.mark.parametrize(("num_short", "bottleneck"), [(1, "none"), (2, "prefill")])
def test_a_bottleneck_is_that_of_most_windows(num_short: int, bottleneck: str) -> None:
    """Of three windows so many have it."""
    made: list[Trial] = []
    question = asked(of=traffic(100, rate=1.0, windows=3), nodes=range(1, 2))
    answer = planted(question, lambda *_: 0.5 if made[-1].window < num_short else 1.5, made=made)
    best = answer.candidate(answer.verdict.best)
    assert best.now.bottleneck == bottleneck


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

    def fleets(candidate: Candidate, varied: Variation) -> float:
        return served * candidate.num_nodes if candidate.splits else 2.0

    verdict = planted(asked(of=traffic(rate=1.0), nodes=range(1, 5)), fleets).verdict
    assert verdict.best == "1 together"
    assert any(reason.startswith(words) for reason in verdict.reasons), verdict.reasons


def test_a_fleet_that_meets_no_slo_says_by_how_much() -> None:
    answer = planted(asked(of=traffic(rate=100.0)), pipeline)
    assert not answer.verdict.meets
    assert "10.00 times as wide" in answer.verdict.headline, "5 s in place of 0.5 s"
    assert "900% over the SLO" in answer.verdict.headline


def test_thresholds_are_where_they_were_planted() -> None:
    """A split of two serves 2 requests/s; together they serve 8 / prompt factor: 2 from 4 times the prompts on."""

    def duel(candidate: Candidate, varied: Variation) -> float:
        return 2.2 if candidate.splits else 4.4 / varied.prompt

    answer = planted(asked(of=traffic(200, rate=1.0), nodes=range(2, 3)), duel)
    prompt = threshold(answer, "prompt")
    assert prompt.pays == "between" and prompt.pays_to is None
    assert prompt.pays_from == pytest.approx(4.4 * 256, rel=0.1), (
        "there the fleet together begins to miss at 1/s"
    )
    rate = threshold(answer, "rate")
    assert (rate.pays, rate.pays_from, rate.pays_to) == ("nowhere", None, None)
    assert "does not pay" in rate.words and "0.125" in rate.words
    assert threshold(answer, "slo_ttft").pays == "nowhere"


@pytest.mark.parametrize(
    ("rate", "capacity", "is_short"), [(1.0, 5.0, False), (1.0, 20.0, True), (20.0, 5.0, True)]
)
def test_a_window_is_short_if_it_is_at_the_highest_rate(rate: float, capacity: float, is_short: bool) -> None:
    """A hundred requests: five a second last for 20 s, twenty for 5 s, and 20 SLOs on TTFT are 10 s.

    A fleet that serves less than the rate of the traffic has been tried at that rate as well.
    """
    answer = planted(asked(of=traffic(100, rate=rate), nodes=range(1, 2)), lambda *_: capacity)
    said = [remark for remark in answer.remarks if "the shortest window of the traffic lasts" in remark]
    assert [remark.startswith("At the highest rate of 1 together ") for remark in said] == [True] * is_short


def test_prompts_grow_by_factors_that_can_be_simulated_each_once() -> None:
    """A block of 16 tokens has 2 or 3 of them, and nothing between."""
    made: list[Trial] = []
    question = asked(of=traffic(100, rate=1.0, input_len=16), nodes=range(2, 3))

    def duel(candidate: Candidate, varied: Variation) -> float:
        return 2.2 if candidate.splits or varied.prompt < 0.15 else 0.5

    answer = planted(question, duel, made=made)
    factors = {one.variation.prompt for one in made}
    assert factors <= {n / 16 for n in range(1, 129)} and 2 / 16 in factors and 3 / 16 in factors
    for factor in factors:
        request = Variation(prompt=factor).of(SimRequest(0.0, 40, 1, (1, 2, 3), 16))
        assert request.input_len == round(40 * factor)
    found = threshold(answer, "prompt")
    assert found.pays_from == pytest.approx(16 * (2 * 3) ** 0.5 / 16, rel=1e-6), "between the two"


def test_prompts_may_grow_until_they_fill_the_context() -> None:
    assert traffic(input_len=200, output_len=200).max_prompt_factor(1000) == 4.0
    full = asked(of=traffic(10, input_len=4096 - 11), nodes=range(1, 2))
    assert planned(full).candidates[0].now.num_failed == 0


@pytest.mark.parametrize(
    ("input_len", "split", "together", "words"),
    [
        (
            1000,
            0.5,
            1.5,
            "does not pay for mean prompts from 125 tokens to 4000 tokens, as far as the context allows (now",
        ),
        (1000, 2.2, 1.5, "on (tried up to 4000 tokens, as far as the context allows) (now"),
        (1000, 2.2, 0.05, "the least that was tried, to 4000 tokens, as far as the context allows (now"),
        (100, 2.2, 0.05, "the least that was tried, to 800 tokens, the most (now"),
        (100, 2.2, 1.5, "on (tried up to 800 tokens) (now"),
    ],
)
def test_a_search_that_the_context_ends_says_so(
    input_len: int, split: float, together: float, words: str
) -> None:
    """A node's context is 4096 tokens."""

    def duel(candidate: Candidate, varied: Variation) -> float:
        return split if candidate.splits else together / varied.prompt

    question = asked(of=traffic(200, rate=1.0, input_len=input_len), nodes=range(2, 3))
    prompt = threshold(planted(question, duel), "prompt")
    assert words in prompt.words


def test_a_split_pays_between_two_rates() -> None:
    def duel(candidate: Candidate, varied: Variation) -> float:
        return 2.0 if candidate.splits else 1.5

    answer = planted(asked(of=traffic(200, rate=1.0), nodes=range(2, 3)), duel)
    rate = threshold(answer, "rate")
    assert rate.pays_from == pytest.approx(1.55, rel=0.1) and rate.pays_to == pytest.approx(
        2.0 / 0.9, rel=0.1
    )
    assert (rate.split, rate.together) == ("1P1D", "2 together")


# ---------------------------------------------------------------------------------------------- the statistics
def parts(*totals: float, stratum: int = 0, weight: float = 1.0) -> Parts:
    """Ten requests each."""
    return Parts(weight * np.array(totals), np.full(len(totals), 10 * weight), [stratum] * len(totals))


def test_an_interval_is_students() -> None:
    one = estimate(parts(10.0, 20.0, 30.0))
    assert one.value == pytest.approx(2.0)
    assert one.high - one.value == pytest.approx(4.303 / 3**0.5, rel=1e-3), (
        "t at 97.5 % and two degrees of freedom"
    )
    assert estimate(parts(5.0)).low == 0.5


def test_a_stratum_counts_as_often_as_it_stands_for() -> None:
    """Bursts are drawn more often than they are. What differs between strata is no noise."""
    usual, bursts = parts(10.0, 10.0, weight=9.0), parts(0.0, 0.0, stratum=1)
    both = Parts(
        np.concatenate([usual.totals, bursts.totals]),
        np.concatenate([usual.sizes, bursts.sizes]),
        [*usual.strata, *bursts.strata],
    )
    one = estimate(both)
    assert one.value == pytest.approx(0.9)
    assert (one.low, one.high) == pytest.approx((0.9, 0.9))


def test_what_both_have_in_common_is_no_noise() -> None:
    bursts = [1.0, 9.0, 2.0, 8.0]
    assert difference(parts(*(one + 0.5 for one in bursts)), parts(*bursts)).is_more_than_noise
    assert not difference(parts(*bursts), parts(*reversed(bursts))).is_more_than_noise


def test_percentiles_of_weighted_values() -> None:
    found = distribution([3.0, 1.0, 2.0], [1.0, 98.0, 1.0])
    assert found == Distribution(mean=1.03, p50=1.0, p90=1.0, p99=2.0)


def test_crossing() -> None:
    assert crossing([(1.0, 1.0), (4.0, 0.8)], 0.9) == pytest.approx(2.0), "halfway in the logarithm"
    assert crossing([(1.0, 1.0), (2.0, 0.5), (4.0, 0.95)], 0.9) == 4.0, "the last"
    assert crossing([(1.0, 0.5)], 0.9) is None
    assert crossing([(1.0, 0.9), (2.0, 0.0)], 0.9) == 1.0
