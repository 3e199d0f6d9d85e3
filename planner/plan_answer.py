"""From what was asked to the whole answer: `answer = await solve(question_of(args), num_jobs, console)`."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from planner import compare
from planner.answer import Answer, CandidateAnswer, Effort, Machine, Question, Verdict
from planner.figures import Slo
from planner.plan_sample import Option, Sample
from planner.plan_search import Aim, Curve, Prices, differs, options, search
from planner.plan_thresholds import Axis, sensitivity, thresholds
from planner.plan_traffic import Traffic, traffic_of
from planner.plan_trials import Setting, Trial, Trials
from planner.plan_verdict import percent, point_now, rate, verdict
from planner.plan_workers import Workers
from planner.profile import Profile, load_profile
from planner.simulate import Run

Report = Callable[[str], None]

LINE_EVERY = 20
"""Simulations. So often a line says how far a plan is where stderr is no terminal."""
MIN_TTFTS = 20
"""A queue that grows must be seen to: a window is to last as long as so many SLOs on TTFT."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Everything that was asked, read and checked."""

    profiles: tuple[tuple[Path, Profile], ...]
    """One for all nodes, or those of prefill and of decode nodes."""
    prices: Prices | None
    traffic: Traffic
    aim: Aim
    nodes: range
    ways: tuple[compare.Way, ...] = ()
    """Of a comparison, which is asked for in place of a plan."""
    num_seeds: int = 1

    @property
    def setting(self) -> Setting:
        """What all simulations share."""
        return Setting(
            screen=self.traffic.screen,
            windows=self.traffic.windows,
            prefill=self.profiles[0][1],
            decode=self.profiles[-1][1],
            slo=self.aim.slo,
        )

    @property
    def machines(self) -> tuple[str, ...]:
        """On which nodes may do both."""
        return ("",) if len(self.profiles) == 1 else ("prefill", "decode")

    def price_of(self, option: Option) -> float:
        """Of a fleet; without prices every node costs the same."""
        return (self.prices or Prices(prefill=1.0, decode=1.0)).of(option)


def question_of(args: Namespace) -> Asked:
    """Read the files that the flags name. Raises ConfigError."""
    names = ("profile",) if args.profile is not None else ("prefill_profile", "decode_profile")
    prices = None
    if args.price is not None or args.prefill_price is not None:
        prices = Prices(prefill=args.price or args.prefill_price, decode=args.price or args.decode_price)
    slo = Slo(ttft_s=args.slo_ttft_ms / 1000, itl_s=args.slo_itl_ms / 1000)
    ways = () if args.compare is None else tuple(compare.ways(compare.parse_fleet(args.fleet), args.compare))
    profiles = tuple(
        (path, load_profile(path, f"--{name.replace('_', '-')}"))
        for name, path in ((name, getattr(args, name)) for name in names)
    )
    num_nodes = ways[0].candidate.num_nodes if ways else args.nodes[-1]
    cache_tokens = num_nodes * max(profile.node.pool_tokens for _, profile in profiles)
    return Asked(
        profiles=profiles,
        prices=prices,
        traffic=traffic_of(args, cache_tokens),
        aim=Aim(slo=slo, good_share=args.good_share),
        nodes=args.nodes,
        ways=ways,
        num_seeds=args.seeds if ways else 1,
    )


async def solve(asked: Asked, num_jobs: int, console: Console) -> Answer:
    """Simulate in processes of their own and show progress. Raises ConfigError and WorkerDied."""
    async with Workers(asked.setting, num_jobs) as workers:
        with console.status("") as status:
            num_runs, cpu_s = 0, 0.0

            async def run(trial: Trial) -> Run:
                nonlocal num_runs, cpu_s
                done = await workers.run(trial)
                num_runs, cpu_s = num_runs + 1, cpu_s + done.cpu_s
                words = f"{num_runs} simulations, {cpu_s:.0f} s of CPU; now {trial.option.name}"
                status.update(words)
                if not console.is_terminal and num_runs % LINE_EVERY == 0:
                    console.print(words)
                return done

            return await answer_by(asked, run, console.print)


async def answer_by(asked: Asked, run: Callable[[Trial], Awaitable[Run]], report: Report) -> Answer:
    """The answer, from trials that `run` simulates."""
    started = time.monotonic()
    trials = Trials(asked.setting, run, asked.num_seeds)

    def effort() -> Effort:
        made = trials.made()
        return Effort(
            seconds=time.monotonic() - started,
            cpu_s=sum(one.cpu_s for one in made),
            num_simulations=len(made),
            num_simulated_reqs=sum(len(one.served) for one in made),
        )

    return await (_compare if asked.ways else _plan)(asked, trials, report, effort)


async def _plan(asked: Asked, trials: Trials, report: Report, effort: Callable[[], Effort]) -> Answer:
    aim = asked.aim

    def found(curve: Curve) -> None:
        most = "no rate" if curve.max_rate is None else f"up to {rate(curve.max_rate.value)}"
        report(f"{curve.option.name}: {most} {_speed(trials.made(curve.option))}")

    curves = await search(trials, options(asked.nodes, asked.machines), aim, asked.price_of, found)
    best, words = await verdict(trials, curves, asked.price_of)
    report("thresholds and sensitivity ...")
    traffic = asked.traffic
    now: dict[Axis, float] = {
        "prompt": traffic.record.prompt_tokens.mean,
        "rate": asked.setting.rate,
        "slo_ttft": aim.slo.ttft_s,
        "slo_itl": aim.slo.itl_s,
    }
    num_nodes = max(2, best.option.candidate.num_nodes)
    limit = min(profile.node.context_length for _, profile in asked.profiles)
    found_thresholds = await thresholds(
        trials, aim, curves, num_nodes, asked.machines, now, traffic.max_prompt_factor(limit)
    )
    return Answer(
        question=_question(asked),
        candidates=tuple(_curve(asked, trials, curve, best) for curve in curves),
        verdict=words,
        thresholds=tuple(found_thresholds),
        sensitivity=tuple(await sensitivity(trials, best, curves, asked.price_of)),
        remarks=(*_remarks(asked), *_remarks_on(best, asked)),
        effort=effort(),
    )


def _candidate(
    asked: Asked, trials: Trials, option: Option, samples: Sequence[Sample], **more: Any
) -> CandidateAnswer:
    """What is said of every option; `more` are the other fields of its answer."""
    candidate, made = option.candidate, trials.made(option)
    as_measured = asked.profiles[-1][1].node.schedule_options.enable_mixed_chunk
    return CandidateAnswer(
        name=option.name,
        num_prefill=candidate.num_prefill,
        num_decode=candidate.num_decode,
        enable_mixed_chunk=as_measured
        if candidate.enable_mixed_chunk is None
        else candidate.enable_mixed_chunk,
        settings=dict(option.settings),
        price=None if asked.prices is None else asked.prices.of(option),
        points=tuple(sample.point(asked.aim.slo, asked.aim.good_share) for sample in samples),
        num_simulated_reqs=sum(len(one.served) for one in made),
        cpu_s=sum(one.cpu_s for one in made),
        **more,
    )


def _curve(asked: Asked, trials: Trials, curve: Curve, best: Curve) -> CandidateAnswer:
    price = None if asked.prices is None else asked.prices.of(curve.option)
    is_comparable = curve is not best and curve.is_screened is best.is_screened
    return _candidate(
        asked,
        trials,
        curve.option,
        curve.samples,
        max_rate=curve.max_rate,
        max_rate_is_bound=curve.is_bound,
        goodput_a_price=None
        if price is None or curve.max_rate is None
        else curve.max_rate.value * asked.aim.good_share * 3600 / price,
        is_screened=curve.is_screened,
        difference=differs(best.now, curve.now, asked.aim.slo) if is_comparable else None,
    )


# ------------------------------------------------------------------------------------------------- comparison
async def _compare(asked: Asked, trials: Trials, report: Report, effort: Callable[[], Effort]) -> Answer:

    async def one(way: compare.Way) -> Sample:
        option = Option(candidate=way.candidate, settings=way.settings)
        sample = await trials.sample(option, trials.setting.whole)
        report(f"{option.name}: {_speed(trials.made(option))}")
        return sample

    samples = await asyncio.gather(*map(one, asked.ways))
    base = samples[0]
    candidates = tuple(
        _candidate(
            asked,
            trials,
            one.option,
            [one],
            difference=None if one is base else differs(base, one, asked.aim.slo),
        )
        for one in samples
    )
    return Answer(
        question=_question(asked),
        candidates=candidates,
        base=base.option.name,
        verdict=_compared(candidates, asked.aim),
        remarks=(*_remarks(asked), *_short_windows(asked, 1.0, "The")),
        effort=effort(),
    )


def _compared(candidates: Sequence[CandidateAnswer], aim: Aim) -> Verdict:
    """The setting with the most goodput, if that is more than noise, else the base."""
    base = candidates[0]
    better = [one for one in candidates if one.difference is not None and one.difference.goodput.low > 0]
    best = max(better, key=lambda one: one.now.goodput.value, default=base)
    other = [one for one in candidates if one.difference is not None and one.difference.is_more_than_noise]
    if best is base:
        headline = f"Nothing that was compared has more goodput than {base.name}, but for noise."
    else:
        assert best.difference is not None
        gain = best.difference.goodput
        interval = f"({gain.low:.3g} to {gain.high:.3g})"
        headline = f"{best.name} has {rate(gain.value)} {interval} more goodput than {base.name}."
    differ = "differs" if len(other) == 1 else "differ"
    return Verdict(
        best=best.name,
        splits=best.num_prefill > 0,
        meets=best.now.good_share.value >= aim.good_share,
        headline=headline,
        reasons=(f"{len(other)} of {len(candidates) - 1} {differ} from the base by more than noise.",),
        best_of=(),
    )


# ---------------------------------------------------------------------------------------------------- remarks
def _question(asked: Asked) -> Question:
    roles = ("both",) if len(asked.profiles) == 1 else ("prefill", "decode")
    prices = asked.prices
    return Question(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        traffic=asked.traffic.record,
        slo=asked.aim.slo,
        good_share=asked.aim.good_share,
        machines=tuple(
            Machine(
                role=role,  # type: ignore[arg-type]  # one of the three
                profile=str(path),
                measured=profile.measured,
                price=None if prices is None else (prices.prefill if role == "prefill" else prices.decode),
            )
            for role, (path, profile) in zip(roles, asked.profiles, strict=True)
        ),
    )


def _remarks(asked: Asked) -> tuple[str, ...]:
    """What makes any answer to the question doubtful."""
    remarks = [f"{path}: {remark}" for path, profile in asked.profiles for remark in profile.measured.remarks]
    remarks += asked.traffic.remarks
    for path, profile in asked.profiles:
        limit = profile.node.context_length
        num_long = sum(one.input_len + one.output_len > limit for one in asked.traffic.requests)
        if num_long:
            remarks.append(
                f"Requests that are longer than the {limit} tokens of context of {path}: {num_long}. They fail on "
                "every such node."
            )
    return tuple(remarks)


def _remarks_on(best: Curve, asked: Asked) -> list[str]:
    """What makes this answer doubtful."""
    highest = asked.setting.rate if best.max_rate is None else best.max_rate.value
    load = max(highest / asked.setting.rate, 1.0)
    remarks = [*_short_windows(asked, load, f"At the highest rate of {best.option.name} the")]
    share = point_now(best).good_share
    if share.low < asked.aim.good_share <= share.high:
        remarks.append(
            f"{best.option.name} is close to the limit: {percent(share)} of the requests are good, and "
            f"{asked.aim.good_share:.0%} are asked for."
        )
    return remarks


def _short_windows(asked: Asked, load: float, begin: str) -> Iterator[str]:
    """A sentence that goes on from `begin` if windows are short; at `load`, the same requests come in less time."""
    ttft_s = asked.aim.slo.ttft_s
    shortest_s = min(window.requests[-1].at_s for window in asked.traffic.windows) / load
    if shortest_s < MIN_TTFTS * ttft_s:
        yield (
            f"{begin} shortest window of the traffic lasts {shortest_s:.3g} s, which is not long beside an SLO of "
            f"{ttft_s:.3g} s on TTFT: queues that would grow on have no time to, so rates and goodput are too high. "
            "More requests (--requests, or a longer trace) help."
        )


def _speed(made: Sequence[Run]) -> str:
    num_reqs = sum(len(one.served) for one in made)
    per_request_ms = 1000 * sum(one.cpu_s for one in made) / max(1, num_reqs)
    return f"({num_reqs} requests simulated, {per_request_ms:.2g} ms of CPU each)"
