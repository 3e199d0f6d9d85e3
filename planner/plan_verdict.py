"""The verdict in words: what to run, whether to split, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.answer import BestOf, Estimate, Point, Verdict
from planner.plan_sample import Option
from planner.plan_search import Aim, Curve, choose, tied_with_best
from planner.plan_trials import Trials
from planner.simulate import Bottleneck
from planner.words import seconds

WHAT_BOUNDS = {
    Bottleneck.PREFILL: "prompts that wait for prefill or are long in it",
    Bottleneck.DECODE_COMPUTE: "decode steps that take too long",
    Bottleneck.DECODE_PAGES: "waiting for pages or rows of a decode node",
    Bottleneck.LINKS: "pages on their way between nodes",
    Bottleneck.ROUTER: "the router",
}


async def verdict(
    trials: Trials, curves: Sequence[Curve], price_of: Callable[[Option], float]
) -> tuple[Curve, Verdict]:
    """The best of the curves, and the words for it."""
    best = await choose(trials, curves, price_of)
    counts = sorted({one.option.candidate.num_nodes for one in curves})
    best_of = [
        await _best_of(trials, [c for c in curves if c.option.candidate.num_nodes == num]) for num in counts
    ]
    meets = best.aim.is_met_by(best.now)
    return best, Verdict(
        best=best.option.name,
        splits=best.option.candidate.splits,
        meets=meets,
        headline=_headline(best, meets=meets),
        reasons=tuple(_reasons(best, curves, best_of)),
        best_of=tuple(best_of),
    )


async def _best_of(trials: Trials, curves: Sequence[Curve]) -> BestOf:
    tied = await tied_with_best(trials, [one for one in curves if not one.is_screened] or curves)
    named = tied[0]
    return BestOf(
        num_nodes=named.option.candidate.num_nodes,
        name=named.option.name,
        splits=named.option.candidate.splits,
        tied_with=tuple(one.option.name for one in tied[1:]),
        meets=named.aim.is_met_by(named.now),
    )


def _headline(best: Curve, *, meets: bool) -> str:
    aim, point = best.aim, point_now(best)
    nodes = best.option.name
    if meets:
        advice = f"Split: {nodes}" if best.option.candidate.splits else f"Do not split: {nodes}"
        return f"{advice} serves {percent(point.good_share)} of {rate(point.rate)} within both SLOs."
    return (
        f"None of these fleets meets the SLOs for {aim.good_share:.0%} of {rate(point.rate)}; {nodes} is nearest, "
        f"with {percent(point.good_share)}. {how_far(best)}"
    )


def how_far(best: Curve) -> str:
    """By how much an SLO is missed."""
    point, slo, share = point_now(best), best.aim.slo, best.aim.good_share
    ttft, itl = (best.now.quantile(field, share) for field in ("ttft_s", "itl_s"))
    if point.slo_factor is None or ttft is None or itl is None:
        return f"{point.num_failed} of {point.num_reqs} requests fail, so no SLO would be met."
    missed = [
        f"{share:.0%} of the requests have {name} within {seconds(value)}, {value / bound - 1:.0%} over the SLO"
        for name, value, bound in (("TTFT", ttft, slo.ttft_s), ("ITL", itl, slo.itl_s))
        if value > bound
    ]
    both = f"Both SLOs would have to be {point.slo_factor:.2f} times as wide"
    return f"{both}: {', and '.join(missed)}." if missed else f"{both}, since no request may miss either."


def _reasons(best: Curve, curves: Sequence[Curve], best_of: Sequence[BestOf]) -> list[str]:
    aim, num_nodes = best.aim, best.option.candidate.num_nodes
    reasons = [_reach(best, aim)]
    same = next(one for one in best_of if one.num_nodes == num_nodes)
    if best.option.name in (same.name, *same.tied_with) and same.tied_with:
        ties = ", ".join(name for name in (same.name, *same.tied_with) if name != best.option.name)
        reasons.append(f"With as many nodes, {ties} cannot be told from it; the simplest of them is named.")
    others = [one for one in curves if one.option.candidate.splits is not best.option.candidate.splits]
    kind = "fleet of the same machines together" if best.option.candidate.splits else "split"
    rivals = [one for one in others if one.option.candidate.num_nodes == num_nodes]
    if rivals:
        reasons.append(f"The best {kind}: {_reach(_most(rivals), aim)}")
    elif others:  # the best is one node, which nothing splits
        meeting = [one for one in others if aim.is_met_by(one.now)]
        least = min((one.option.candidate.num_nodes for one in meeting), default=0)
        rival = _most([one for one in meeting if one.option.candidate.num_nodes == least] or others)
        what = (
            f"The smallest {kind} that meets the SLOs"
            if meeting
            else f"No {kind} meets the SLOs; the nearest"
        )
        reasons.append(f"{what} has {rival.option.candidate.num_nodes} nodes: {_reach(rival, aim)}")
    return reasons


def _most(curves: Sequence[Curve]) -> Curve:
    """That with the highest rate; if none has one, the nearest to the SLOs."""
    return max(curves, key=lambda one: (one.max_rate.value if one.max_rate else 0.0, -one.slo_factor))


def _reach(one: Curve, aim: Aim) -> str:
    point, name = point_now(one), one.option.name
    held = Bottleneck(point.bottleneck)
    why = f" What holds it back there: {WHAT_BOUNDS[held]}." if held in WHAT_BOUNDS else ""
    now = f"{percent(point.good_share)} of the requests are good at {rate(point.rate)}."
    if one.max_rate is None:
        return f"{name} meets the SLOs for {aim.good_share:.0%} of the requests at no rate. {now}{why}"
    interval = f" ({one.max_rate.low:.3g} to {one.max_rate.high:.3g})"
    most = f"{'at least ' if one.is_bound else ''}{rate(one.max_rate.value)}{interval}"
    return f"{name} serves {most} with {aim.good_share:.0%} within both SLOs; {now}{why}"


def point_now(one: Curve) -> Point:
    """At the rate of the traffic."""
    return one.now.point(one.aim.slo, one.aim.good_share)


def percent(share: Estimate) -> str:
    """97 % (95 to 99)."""
    return f"{share.value:.0%} ({100 * share.low:.0f} to {100 * share.high:.0f})"


def rate(value: float) -> str:
    """With its unit."""
    return f"{value:.3g} requests/s"
