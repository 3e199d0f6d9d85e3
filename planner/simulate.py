"""One candidate under one workload: a simulated fleet, run to the end, and what its clients and its nodes saw.

candidate, profile ──▶ FleetShape ──▶ SimFleet.run ──▶ Run(what clients saw, busy shares, bottleneck)

All decisions are those of the real schedulers and of the real dispatcher. The profile says what everything costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import msgspec

from planner.candidate import Candidate
from planner.figures import Served, Slo
from planner.profile import Profile
from planner.simulator.fleet import FleetShape, Outcome, SimFleet
from planner.simulator.node import NodeShape
from planner.simulator.transport import NetworkModel
from planner.traffic.trace import SimRequest
from router.dispatch.stages import StartStage
from shared.protocol.messages import Role

FEW_MISSES = 0.01
"""A fleet of which no larger share of the requests misses an SLO has no bottleneck."""


class Bottleneck(StrEnum):
    """What most of the requests that missed an SLO had waited for longest."""

    PREFILL = "prefill"
    """Prompts, in the queue of the node that computes them or while they are computed."""
    DECODE_COMPUTE = "decode compute"
    """Tokens, which took longer than the SLO between one and the next while they were decoded."""
    DECODE_PAGES = "decode pages"
    """Pages or a row of a decode node: before the prompt was computed, after a retraction, or in vain."""
    LINKS = "links"
    """Pages on their way from one node to another."""
    ROUTER = "router"
    """The router's one thread, and messages."""
    NONE = "none"
    """At most FEW_MISSES of the requests missed an SLO or failed."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate came to under one workload."""

    served: tuple[Served | None, ...]
    """Of each request, in order of arrival. None: it failed."""
    busy: dict[str, float]
    """Shares of the time in which requests arrive, or of a burst until all have ended: of all devices of `prefill`
    and `decode` nodes or of those that do both (`together`), that in which a forward ran; of the busiest node's
    network card (`link`); of the router's thread (`router`). Decode steps follow each other while anything runs, so
    a high share of a decode fleet alone is no bottleneck."""
    transfer_bytes_s: float
    """Of KV that moved between nodes, all of them together, in that time."""
    cached_share: float
    """Of the prompt tokens of requests that were served, those found in a RadixCache."""
    bottleneck: Bottleneck


def simulate(candidate: Candidate, requests: Sequence[SimRequest], *, profile: Profile, slo: Slo) -> Run:
    """Send `requests`, in order of arrival, through the fleet of `candidate` and run it until all have ended.

    Every node is one of `profile`, and `requests` are not empty. Requests that a fleet refuses, or cuts short, count
    as failed. The same arguments give the same run.
    """
    fleet = SimFleet(fleet_shape(candidate, profile), profile.forward)
    fleet.submit(requests)
    fleet.run(until=requests[-1].at_s)
    seconds = fleet.loop.now - requests[0].at_s
    busy, transfer_bytes_s = _busy(fleet, seconds)
    fleet.run()
    whole_s = fleet.loop.now - requests[0].at_s
    if seconds <= whole_s / 2:
        busy, transfer_bytes_s = _busy(fleet, whole_s)
    done = [outcome for outcome in fleet.outcomes.values() if outcome.ok]
    served = [outcome.served for outcome in done]
    by_request = {id(outcome.request): one for outcome, one in zip(done, served, strict=True)}
    num_failed = len(requests) - len(served)
    prompt_tokens = max(1, sum(outcome.request.input_len for outcome in done))
    return Run(
        served=tuple(by_request.get(id(request)) for request in requests),
        busy=busy,
        transfer_bytes_s=transfer_bytes_s,
        cached_share=sum(outcome.cached_tokens for outcome in done) / prompt_tokens,
        bottleneck=_bottleneck(done, served, num_failed, slo),
    )


def fleet_shape(candidate: Candidate, profile: Profile) -> FleetShape:
    """The simulated fleet of a candidate, of nodes of this profile."""
    node, schedule, transfer = profile.node, profile.node.schedule_options, profile.transfer
    if candidate.enable_mixed_chunk is not None:
        schedule = replace(schedule, enable_mixed_chunk=candidate.enable_mixed_chunk)
    shape = NodeShape(
        pool_tokens=node.pool_tokens,
        page_size=node.page_size,
        context_length=node.context_length,
        kv_bytes_per_token=node.kv_bytes_per_token,
        disable_radix_cache=node.disable_radix_cache,
        host_kv_tokens=node.host_kv_tokens,
        schedule=schedule,
    )
    return FleetShape(
        num_prefill=candidate.num_prefill,
        num_decode=candidate.num_decode,
        prefill=shape,
        decode=shape,
        network=NetworkModel(
            bandwidth_bytes_s=transfer.bytes_s,
            latency_s=transfer.message_s,
            pages_latency_s=transfer.latency_s,
        ),
        router=profile.router,
        local_prefill_tokens=candidate.local_prefill_tokens,
        prefill_policy="ttft",
        decode_policy="ttft",
    )


def _busy(fleet: SimFleet, seconds: float) -> tuple[dict[str, float], float]:
    """The busy shares of the first so many seconds, which have just passed, and the bytes a second."""
    seconds = max(seconds, 1e-9)
    splits = any(node.role is Role.PREFILL for node in fleet.nodes.values())
    busy = {}
    for role, name in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode" if splits else "together")):
        shares = [node.stream.busy_s / seconds for node in fleet.nodes.values() if node.role is role]
        if shares:
            busy[name] = min(1.0, sum(shares) / len(shares))
    if splits:
        busy["link"] = min(1.0, fleet.transport.most_busy_s / seconds)
    busy["router"] = min(1.0, fleet.router_busy_s / seconds)
    return busy, fleet.transport.nbytes / seconds


# -------------------------------------------------------------------------------------- what clients have seen
_CAUSE_OF = {
    StartStage.DISPATCH: Bottleneck.ROUTER,
    StartStage.FAILOVER: Bottleneck.ROUTER,
    StartStage.RESERVATION: Bottleneck.DECODE_PAGES,
    StartStage.FETCH: Bottleneck.LINKS,
    StartStage.QUEUE: Bottleneck.PREFILL,
    StartStage.PREFILL: Bottleneck.PREFILL,
    StartStage.DELIVERY: Bottleneck.ROUTER,
}


def _bottleneck(done: Sequence[Outcome], served: Sequence[Served], num_failed: int, slo: Slo) -> Bottleneck:
    causes = Counter(
        _cause(outcome, one, slo) for outcome, one in zip(done, served, strict=True) if not one.is_good(slo)
    )
    causes[Bottleneck.DECODE_PAGES] += num_failed  # no room for the whole of them
    if causes.total() <= FEW_MISSES * (len(served) + num_failed):
        return Bottleneck.NONE
    return max(Bottleneck, key=lambda cause: causes[cause])


def _cause(outcome: Outcome, one: Served, slo: Slo) -> Bottleneck:
    """What a request that missed an SLO has waited for longest."""
    stages = (
        {stage.stage: stage.seconds for stage in outcome.start.stages} if outcome.start is not None else {}
    )
    if one.ttft_s > slo.ttft_s:
        waits: defaultdict[Bottleneck, float] = defaultdict(float)
        for stage, seconds in stages.items():
            if stage in _CAUSE_OF:
                waits[_CAUSE_OF[stage]] += seconds
        waits[Bottleneck.ROUTER] += outcome.started_at - outcome.request.at_s
        return max(waits, key=lambda cause: waits[cause])
    excess_s = (one.e2e_s - one.ttft_s) - slo.itl_s * (one.num_tokens - 1)
    transfer_s = stages.get(StartStage.TRANSFER, 0.0)
    if max(transfer_s, outcome.retracted_s) < excess_s / 2:
        return Bottleneck.DECODE_COMPUTE
    return Bottleneck.LINKS if transfer_s > outcome.retracted_s else Bottleneck.DECODE_PAGES
