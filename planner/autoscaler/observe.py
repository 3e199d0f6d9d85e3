"""The work of a fleet from the loads that its nodes report: their counters only grow, so rates are differences.

loads of all nodes, now and then ──▶ FleetLoads.observe ──▶ FleetSeen
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from planner.autoscaler.capacity import Work
from planner.autoscaler.decision import RATE_S, FleetSeen, NodeSeen, NodeState
from shared.protocol.messages import Role

MIN_RATE_S = 4.0
"""Loads are up to a second old: rates over a shorter time are not known."""

_BUSY_S = 2.0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a node's load that counts here, as it is in `GET /fleet`. Source: shared.protocol.messages.Load."""

    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_bootstrapping: int = 0
    num_retracted: int = 0
    num_pages: int = 0
    num_evictable_pages: int = 0
    num_held_pages: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the router sees it. It has a `load` while it is connected, and then an incarnation."""

    node_id: str
    state: NodeState
    incarnation: str = ""
    load: LoadReport | None = None


class _Counters(NamedTuple):
    """Of one node, or of all since the autoscaler began."""

    computed_tokens: int = 0
    cached_tokens: int = 0
    prompts: int = 0
    output_tokens: int = 0

    def plus(self, other: _Counters, sign: int = 1) -> _Counters:
        return _Counters(*(a + sign * b for a, b in zip(self, other, strict=True)))


class _Reading(NamedTuple):
    at: float
    total: _Counters
    queued_tokens: int
    num_running: int


class FleetLoads:
    """Of the nodes of one role. Means of prompts are kept while none arrive."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._last: dict[str, _Counters] = {}
        """By incarnation."""
        self._total = _Counters()
        self._readings: deque[_Reading] = deque()
        self._tokens_per_prompt = self._cached_per_prompt = 0.0

    def observe(self, now: float, nodes: Sequence[NodeReport]) -> FleetSeen:
        """Take the loads of all nodes. Times grow."""
        loads = [(node.incarnation, node.load) for node in nodes if node.load is not None]
        self._count(loads)
        queued_tokens = sum(load.num_queued_tokens for _, load in loads)
        num_running = sum(load.num_running for _, load in loads)
        self._readings.append(_Reading(now, self._total, queued_tokens, num_running))
        while self._readings[0].at < now - RATE_S:
            self._readings.popleft()
        return FleetSeen(
            nodes=tuple(_seen(node) for node in nodes), work=self._work([load for _, load in loads])
        )

    def _count(self, loads: Sequence[tuple[str, LoadReport]]) -> None:
        known, self._last = self._last, {}
        for incarnation, load in loads:
            counters = _Counters(
                load.num_prompt_tokens - load.num_cached_tokens,
                load.num_cached_tokens,
                load.num_prompts,
                load.num_generated_tokens,
            )
            self._total = self._total.plus(counters.plus(known.get(incarnation, counters), -1))
            self._last[incarnation] = counters

    def _work(self, loads: Sequence[LoadReport]) -> Work | None:
        first, last = self._readings[0], self._readings[-1]
        seconds = last.at - first.at
        if seconds < MIN_RATE_S:
            return None
        new = last.total.plus(first.total, -1)
        if new.computed_tokens and not new.prompts:
            return None  # a node of the release before this one does not count its prompts
        if new.prompts:
            self._tokens_per_prompt = (new.computed_tokens + new.cached_tokens) / new.prompts
            self._cached_per_prompt = new.cached_tokens / new.prompts
        arrived = new.computed_tokens + last.queued_tokens - first.queued_tokens
        return Work(
            prompt_tokens_s=max(0.0, arrived / seconds),
            num_queued_tokens=sum(_queued_here(self._role, load) for load in loads),
            tokens_per_prompt=self._tokens_per_prompt,
            cached_per_prompt=self._cached_per_prompt,
            output_tokens_s=new.output_tokens / seconds,
            mean_running=sum(reading.num_running for reading in self._readings) / len(self._readings),
            num_running=last.num_running,
            num_transferring=sum(load.num_transferring for load in loads),
            num_waiting=sum(load.num_waiting + load.num_bootstrapping + load.num_retracted for load in loads),
            num_held_pages=sum(load.num_held_pages for load in loads),
            num_pages=sum(load.num_pages for load in loads) / max(1, len(loads)),
        )


def _queued_here(role: Role, load: LoadReport) -> float:
    """Prompt tokens that wait for this node.

    Those of requests that wait for a decode node's pages do not, unless this node has enough to compute without them:
    then the pages may well be held by requests that wait for this node.
    """
    if role is Role.DECODE or not load.num_bootstrapping:
        return load.num_queued_tokens
    here = load.num_running + load.num_waiting
    ready_tokens = load.num_queued_tokens * here / (here + load.num_bootstrapping)
    is_busy = ready_tokens > _BUSY_S * load.prefill_tokens_per_s > 0
    return load.num_queued_tokens if is_busy else ready_tokens


def _seen(node: NodeReport) -> NodeSeen:
    load = node.load if node.load is not None else LoadReport()
    return NodeSeen(
        node_id=node.node_id,
        state=node.state,
        num_reqs=load.num_running + load.num_waiting + load.num_transferring + load.num_bootstrapping,
        num_cached_pages=load.num_evictable_pages,
    )
