"""Plans over planted truths: runs without a simulation, and small traffic for real ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import msgspec

from planner.answer import Answer
from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.figures import Served, Slo, arrival_seconds
from planner.plan_answer import Asked, answer_by
from planner.plan_traffic import Traffic
from planner.profile import Measured, NodeKind, Profile, RouterCost, TransferCost
from planner.sample import Aim, Setting, Trial
from planner.simulate import Bottleneck, Run
from planner.traffic.trace import SimRequest

FORWARD = CostModel(a=0.002, b=1e-4, c=0.0, d=0.005, e=1e-4, f=0.0)
NODE = NodeKind(
    pool_tokens=16384,
    page_size=16,
    context_length=4096,
    max_running_requests=32,
    chunked_prefill_size=512,
    kv_bytes_per_token=1024,
)
PROFILE = Profile(
    measured=Measured(at="2026-01-01T00:00:00Z", machine="a machine", model="a model", versions={}),
    node=NODE,
    forward=FORWARD,
    transfer=TransferCost(latency_s=0.001, bytes_s=1e9),
    router=RouterCost(request_s=0.0, token_s=0.0),
)
SLO = Slo(ttft_s=0.5, itl_s=0.05)
GOOD = Served(ttft_s=0.1, e2e_s=0.2, num_tokens=11)
BAD = Served(ttft_s=5.0, e2e_s=5.1, num_tokens=11)

Capacity = Callable[[Candidate], float]
"""Requests a second that a candidate serves within the SLOs."""


def costing(**costs: float) -> Profile:
    """PROFILE with other costs of forwards."""
    return msgspec.structs.replace(PROFILE, forward=CostModel(**(vars(FORWARD) | costs)))


def traffic(num: int = 40, *, rate: float = 1.0, input_len: int = 256, output_len: int = 11) -> Traffic:
    """Requests that arrive at random, exactly `rate` a second, and share nothing."""
    gaps = random.Random(2)
    times = list(accumulate((gaps.expovariate(rate) for _ in range(num - 1)), initial=0.0))
    scale = num / rate / arrival_seconds(times)
    requests = (SimRequest(scale * at, input_len, output_len, (i,), input_len) for i, at in enumerate(times))
    return Traffic(tuple(requests), "made up")


def asked(
    profile: Profile = PROFILE, *, of: Traffic | None = None, nodes: range = range(1, 3), slo: Slo = SLO
) -> Asked:
    """A question about PROFILE, or about another."""
    return Asked(
        path=Path("profile.json"),
        profile=profile,
        traffic=of or traffic(),
        aim=Aim(slo=slo, good_share=0.9),
        nodes=nodes,
    )


def planned(question: Asked) -> Answer:
    """The answer, simulated in this process."""
    setting = question.setting

    async def run(trial: Trial) -> Run:
        return setting.run(trial)

    return asyncio.run(answer_by(question, run, lambda line: None))


def planted(question: Asked, capacity: Capacity, *, made: list[Trial] | None = None) -> Answer:
    """The answer where a fleet serves what `capacity` says, and no more.

    The trials are appended to `made`.
    """

    async def run(trial: Trial) -> Run:
        if made is not None:
            made.append(trial)
        served = capacity(trial.candidate)
        return _planted_run(question.setting, trial, served)

    return asyncio.run(answer_by(question, run, lambda line: None))


def _planted_run(setting: Setting, trial: Trial, capacity: float) -> Run:
    num = len(setting.traffic.requests)
    share = min(1.0, capacity / (setting.traffic.rate * trial.load))
    served = tuple(GOOD if int((i + 1) * share + 1e-9) > int(i * share + 1e-9) else BAD for i in range(num))
    return Run(
        served=served,
        busy={"together": 0.5, "router": 0.0},
        transfer_bytes_s=1e6,
        cached_share=0.0,
        bottleneck=Bottleneck.NONE if share == 1.0 else Bottleneck.PREFILL,
    )
