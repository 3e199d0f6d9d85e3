"""Answers of `router plan` that look like real ones, made by a formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from planner.answer import (
    Answer,
    BestOf,
    CandidateAnswer,
    Difference,
    Effort,
    Estimate,
    FleetUse,
    Machine,
    Point,
    Question,
    Sensitivity,
    Threshold,
    Traffic,
    Transfer,
    Verdict,
)
from planner.candidate import Candidate
from planner.figures import Distribution, Slo
from planner.profile import Measured, Residual

SLO = Slo(ttft_s=0.4, itl_s=0.02)
RATE = 9.0
GOOD_SHARE = 0.9
LOADS = (0.5, 1.0, 1.5, 2.0)
MEASURED = Measured(
    at="2026-11-23T20:00:00+00:00",
    machine="1x H100, 16 cores",
    model="llama-8b",
    versions={"torch": "2.9"},
    residuals=(Residual(what="prefill 512", measured_s=0.02, fitted_s=0.021, spread=0.1),),
)


def near(value: float, part: float = 0.05) -> Estimate:
    return Estimate(value=value, low=value * (1 - part), high=value * (1 + part))


def spread(seconds: float) -> Distribution:
    return Distribution(mean=seconds, p50=0.8 * seconds, p90=2 * seconds, p99=4 * seconds)


def point(fleet: Candidate, load: float, capacity: float) -> Point:
    """`capacity` requests a second is what the fleet can serve; beyond it, fewer and fewer are good."""
    rate = RATE * load
    share = min(0.99, 0.99 * (capacity / rate) ** 2)
    busy = min(1.0, rate / capacity)
    wait_s = 0.02 / max(0.02, 1.02 - busy)
    roles: Sequence[tuple[Literal["prefill", "decode", "together"], int]]
    if fleet.splits:
        roles = (("prefill", fleet.num_prefill), ("decode", fleet.num_decode))
    else:
        roles = (("together", fleet.num_decode),)
    return Point(
        rate=rate,
        load=load,
        num_reqs=400,
        num_failed=0,
        goodput=near(share * rate),
        good_share=Estimate(value=share, low=0.95 * share, high=min(1.0, 1.05 * share)),
        slo_factor=0.5 * rate / capacity,
        ttft_s=spread(0.08 + wait_s),
        itl_s=spread(0.012 + 0.004 * busy),
        use=tuple(
            FleetUse(role=role, num_nodes=num, busy_share=busy, pool_share=0.6 * busy, queued=3 * wait_s)
            for role, num in roles
        ),
        transfer=Transfer(bytes_s=2.1e9, link_busy_share=0.11) if fleet.splits else None,
        router_busy_share=0.03,
        cached_share=0.2,
        stages_s={
            "dispatch": 0.0004,
            "turn": 0.0,
            "failover": 0.0,
            "reservation": 0.01,
            "fetch": 0.0,
            "queue": wait_s,
            "prefill": 0.06,
            "delivery": 0.002,
            "transfer": 0.02 if fleet.splits else 0.0,
        },
        bottleneck="prefill" if share < GOOD_SHARE else "none",
    )


def candidate(
    fleet: Candidate, *, name: str | None = None, price: float | None = None, loads: Sequence[float] = LOADS
) -> CandidateAnswer:
    capacity = (
        5.0 * min(2 * fleet.num_prefill, 3 * fleet.num_decode) if fleet.splits else 4.5 * fleet.num_nodes
    )
    cost = None if price is None else price * fleet.num_nodes
    return CandidateAnswer(
        name=name or fleet.name,
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        enable_mixed_chunk=fleet.enable_mixed_chunk,
        settings={},
        price=cost,
        points=tuple(point(fleet, load, capacity) for load in loads),
        max_rate=near(1.05 * capacity),
        max_rate_is_bound=False,
        goodput_a_price=None if cost is None else 1.05 * capacity * GOOD_SHARE * 3600 / cost,
        is_screened=False,
        difference=None,
        num_simulated_reqs=1600,
        cpu_s=8.0,
    )


def fleets(max_nodes: int) -> list[Candidate]:
    return [
        fleet
        for num in range(1, max_nodes + 1)
        for fleet in (
            Candidate(num_prefill=0, num_decode=num),
            Candidate(num_prefill=0, num_decode=num, enable_mixed_chunk=True),
            *(Candidate(num_prefill=p, num_decode=num - p) for p in range(1, num)),
        )
    ]


def plan_answer(
    *, max_nodes: int = 4, best: str = "1P1D", price: float | None = None, source: str = "trace.jsonl"
) -> Answer:
    candidates = tuple(candidate(fleet, price=price) for fleet in fleets(max_nodes))
    chosen = next(one for one in candidates if one.name == best)
    advice = "Split" if chosen.num_prefill else "Do not split"
    return Answer(
        question=Question(
            at="2026-11-23T22:59:00+00:00",
            traffic=Traffic(
                source=source,
                rate=RATE,
                num_reqs=400,
                seconds=44.0,
                prompt_tokens=Distribution(mean=2100, p50=1500, p90=4700, p99=11000),
                output_tokens=Distribution(mean=230, p50=180, p90=440, p99=900),
                reused_share=0.21,
            ),
            slo=SLO,
            good_share=GOOD_SHARE,
            machines=(Machine(role="both", profile="h100.json", measured=MEASURED, price=price),),
        ),
        candidates=candidates,
        verdict=Verdict(
            best=best,
            splits=chosen.num_prefill > 0,
            meets=True,
            headline=f"{advice}: {best} serves 97 % (95 to 99) of 9 requests/s within both SLOs.",
            reasons=("It serves up to 10.5 requests/s.", "The best fleet together serves 9.5 requests/s."),
            best_of=tuple(
                BestOf(
                    num_nodes=num,
                    name=f"{num} together",
                    splits=False,
                    tied_with=(f"{num} together, mixed chunks",),
                    meets=num > 1,
                )
                for num in range(1, max_nodes + 1)
            ),
        ),
        thresholds=(
            threshold("prompt", "tokens", 2100, "between", pays_from=900),
            threshold("rate", "requests/s", RATE, "between", pays_from=6.5, pays_to=12.5),
            threshold("slo_ttft", "s", SLO.ttft_s, "nowhere"),
            threshold("slo_itl", "s", SLO.itl_s, "everywhere"),
        ),
        sensitivity=tuple(
            Sensitivity(
                what=what,
                factor=factor,
                best=best,
                changes=False,
                goodput_of_best=RATE * factor * 0.95,
                goodput_of_verdict=RATE * factor * 0.9,
                meets=factor < 1,
            )
            for what in ("load", "cost")
            for factor in (0.8, 1.2)
        ),
        remarks=("h100.json: The machine was busy while prefill 2048 was measured.",),
        effort=Effort(seconds=62, cpu_s=110, num_simulations=140, num_simulated_reqs=28000),
    )


def threshold(
    axis: Literal["prompt", "rate", "slo_ttft", "slo_itl"],
    unit: Literal["tokens", "requests/s", "s"],
    now: float,
    pays: Literal["everywhere", "nowhere", "between"],
    *,
    pays_from: float | None = None,
    pays_to: float | None = None,
) -> Threshold:
    return Threshold(
        axis=axis,
        unit=unit,
        now=now,
        pays=pays,
        pays_from=pays_from,
        pays_to=pays_to,
        searched_low=now / 8,
        searched_high=now * 8,
        split="1P1D",
        together="2 together",
        words=f"{axis}: splitting pays {pays} {pays_from} and {pays_to}, now {now}: 1P1D against 2 together.",
    )


def comparison_answer() -> Answer:
    """Of four settings of 2P1D."""
    plan, fleet = plan_answer(), Candidate(num_prefill=2, num_decode=1)
    names = tuple(
        f"schedule-policy={policy} chunked-prefill-size={size}"
        for policy in ("fcfs", "lpm")
        for size in (1024, 4096)
    )
    settings = []
    for at, name in enumerate(names):
        one = candidate(fleet, name=name, loads=(1.0,))
        gain = Estimate(value=0.2 * at, low=0.2 * at - 0.3, high=0.2 * at + 0.3)
        difference = Difference(
            base=names[0], goodput=gain, ttft_mean_s=gain, itl_mean_s=gain, is_more_than_noise=at > 1
        )
        settings.append(
            replace(
                one,
                max_rate=None,
                settings=dict(part.split("=", 1) for part in name.split()),
                difference=difference if at else None,
            )
        )
    return Answer(
        question=plan.question,
        candidates=tuple(settings),
        base=names[0],
        verdict=Verdict(
            best=names[3],
            splits=True,
            meets=True,
            headline=f"{names[3]} has 0.6 requests/s (0.3 to 0.9) more goodput than {names[0]}.",
            reasons=("2 of 3 differ from the base by more than noise.",),
            best_of=(),
        ),
        effort=plan.effort,
    )
