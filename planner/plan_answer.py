"""From what was asked to the whole answer: `answer = await solve(question_of(args), num_jobs, console)`."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from planner.answer import Answer, CandidateAnswer, Estimate, Question, Verdict
from planner.candidate import Candidate, candidates
from planner.figures import Slo
from planner.plan_traffic import Traffic, traffic_of
from planner.profile import Profile, load_profile
from planner.sample import Aim, Setting, Trial, Trials
from planner.search import Curve, choose, curve
from planner.simulate import Bottleneck, Run
from planner.workers import simulating

MIN_TTFTS = 20
"""A queue that grows must be seen to: the traffic is to last as long as so many SLOs on TTFT."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Everything that was asked, read and checked."""

    path: Path
    """The profile's file."""
    profile: Profile
    traffic: Traffic
    aim: Aim
    nodes: range

    @property
    def setting(self) -> Setting:
        """What all simulations share."""
        return Setting(traffic=self.traffic, profile=self.profile, aim=self.aim)


def question_of(args: Namespace) -> Asked:
    """Read the files that the flags name. Raises ConfigError."""
    slo = Slo(ttft_s=args.slo_ttft_ms / 1000, itl_s=args.slo_itl_ms / 1000)
    return Asked(
        path=args.profile,
        profile=load_profile(args.profile),
        traffic=traffic_of(args),
        aim=Aim(slo=slo, good_share=args.good_share),
        nodes=args.nodes,
    )


async def solve(asked: Asked, num_jobs: int, console: Console) -> Answer:
    """Simulate in processes of their own and show progress. Raises ConfigError and WorkerDied."""
    async with simulating(asked.setting, num_jobs) as simulate:
        with console.status("") as status:

            async def run(trial: Trial) -> Run:
                status.update(f"{trial.candidate.name} at {rate(trial.load * asked.traffic.rate)}")
                return await simulate(trial)

            return await answer_by(asked, run, console.print)


async def answer_by(
    asked: Asked, run: Callable[[Trial], Awaitable[Run]], report: Callable[[str], None]
) -> Answer:
    """The answer, from trials that `run` simulates."""
    trials = Trials(asked.setting, run)

    async def searched(candidate: Candidate) -> Curve:
        found = await curve(trials, candidate)
        report(f"{candidate.name}: up to {rate(found.most)}")
        return found

    curves = await asyncio.gather(*map(searched, candidates(asked.nodes)))
    best, *ties = await choose(trials, curves)
    return Answer(
        question=Question(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            traffic=asked.traffic.record,
            slo=asked.aim.slo,
            good_share=asked.aim.good_share,
            profile=str(asked.path),
            measured=asked.profile.measured,
        ),
        candidates=tuple(map(_candidate, curves)),
        verdict=_verdict(best, [one.candidate.name for one in ties], curves),
        remarks=tuple(_remarks(asked, best)),
    )


def _candidate(one: Curve) -> CandidateAnswer:
    fleet = one.candidate
    return CandidateAnswer(
        name=fleet.name,
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        points=tuple(sample.point() for sample in one.samples),
        max_rate=one.max_rate,
        max_rate_is_bound=one.is_bound,
    )


def _remarks(asked: Asked, best: Curve) -> Iterator[str]:
    """What makes the answer doubtful."""
    yield from (f"{asked.path}: {remark}" for remark in asked.profile.measured.remarks)
    yield from asked.traffic.remarks
    limit = asked.profile.node.context_length
    num_long = sum(one.input_len + one.output_len > limit for one in asked.traffic.counted)
    if num_long:
        yield f"{num_long} requests fail on every node: they are longer than its context of {limit} tokens."
    name, ttft_s = best.candidate.name, asked.aim.slo.ttft_s
    shortest_s = asked.traffic.seconds / max(best.most / asked.traffic.rate, 1.0)
    if shortest_s < MIN_TTFTS * ttft_s:
        yield (
            f"At the highest rate of {name} the traffic lasts {shortest_s:.3g} s, which is not long beside an SLO of "
            f"{ttft_s:.3g} s on TTFT: queues that would grow on have no time to, so rates and goodput are too high. "
            "More requests (--requests, or a longer trace) help."
        )


def _verdict(best: Curve, tied_with: Sequence[str], curves: Sequence[Curve]) -> Verdict:
    """The words for the best of the curves."""
    return Verdict(
        best=best.candidate.name,
        splits=best.candidate.splits,
        meets=best.now.meets,
        tied_with=tuple(tied_with),
        headline=_headline(best),
        reasons=tuple(_reasons(best, curves, tied_with)),
    )


def _headline(best: Curve) -> str:
    point, name, wanted = best.now.point(), best.candidate.name, best.now.setting.aim.good_share
    if best.now.meets:
        advice = f"Split: {name}" if best.candidate.splits else f"Do not split: {name}"
        return f"{advice} serves {percent(point.good_share)} of {rate(point.rate)} within both SLOs."
    how_far = f"{point.num_failed} of {point.num_reqs} requests fail, so no SLO would be met."
    if point.slo_factor is not None:
        how_far = f"Both SLOs would have to be {point.slo_factor:.2f} times as wide."
    return (
        f"None of these fleets meets the SLOs for {wanted:.0%} of {rate(point.rate)}; {name} is nearest, with "
        f"{percent(point.good_share)}. {how_far}"
    )


def _reasons(best: Curve, curves: Sequence[Curve], tied_with: Sequence[str]) -> Iterator[str]:
    num_nodes, splits = best.candidate.num_nodes, best.candidate.splits
    yield _reach(best)
    if tied_with:
        ties = ", ".join(tied_with)
        yield f"With as many nodes, {ties} cannot be told from it; the simplest of them is named."
    others = [one for one in curves if one.candidate.splits is not splits]
    kind = "fleet of the same machines together" if splits else "split"
    rivals = [one for one in others if one.candidate.num_nodes == num_nodes]
    if rivals:
        yield f"The best {kind}: {_reach(_highest(rivals))}"
    elif others:  # the best is one node, which nothing splits
        meeting = [one for one in others if one.now.meets]
        least = min((one.candidate.num_nodes for one in meeting), default=0)
        rival = _highest([one for one in meeting if one.candidate.num_nodes == least] or others)
        nearest = f"No {kind} meets the SLOs; the nearest"
        what = f"The smallest {kind} that meets the SLOs" if meeting else nearest
        yield f"{what} has {rival.candidate.num_nodes} nodes: {_reach(rival)}"


def _highest(curves: Sequence[Curve]) -> Curve:
    """That with the highest rate; if none has one, the nearest to the SLOs."""
    return max(curves, key=lambda one: (one.most, -one.now.slo_factor))


def _reach(one: Curve) -> str:
    point, name, share = one.now.point(), one.candidate.name, one.now.setting.aim.good_share
    why = f" What holds it back there: {point.bottleneck}." if point.bottleneck != Bottleneck.NONE else ""
    now = f"{percent(point.good_share)} of the requests are good at {rate(point.rate)}."
    if one.max_rate is None:
        return f"{name} meets the SLOs for {share:.0%} of the requests at no rate. {now}{why}"
    interval = f" ({one.max_rate.low:.3g} to {one.max_rate.high:.3g})"
    most = f"{'at least ' if one.is_bound else ''}{rate(one.max_rate.value)}{interval}"
    return f"{name} serves {most} with {share:.0%} within both SLOs; {now}{why}"


def percent(share: Estimate) -> str:
    """97% (95 to 99)."""
    return f"{share.value:.0%} ({100 * share.low:.0f} to {100 * share.high:.0f})"


def rate(value: float) -> str:
    """4.2 requests/s."""
    return f"{value:.3g} requests/s"
