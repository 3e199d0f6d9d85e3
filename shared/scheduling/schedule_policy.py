"""The order in which waiting requests are offered to the PrefillAdder.

A policy makes a sort key; smaller goes first, and arrival decides between equals. Two things lead the key of
every policy: the request's class (priority and waiting, see `priority`), and whether it was retracted, since it
came earlier and somebody reads its stream.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shared import log
from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.cached_prefixes import CachedPrefixes
from shared.scheduling.dfs_weight import dfs_positions
from shared.scheduling.priority import PriorityRule
from shared.scheduling.req import Req

LPM_MAX_WAITING = 128
"""With more requests waiting `lpm` acts as `fcfs`: matching costs O(requests * prompt length) every step."""

SortKey = Callable[[Req], Any]


class Round:
    """What the policies look at in one scheduling decision. `waiting` is in order of arrival."""

    def __init__(
        self,
        waiting: Sequence[Req],
        running: Sequence[Req],
        being_computed: Sequence[Req],
        cached: CachedPrefixes,
        rng: random.Random,
    ) -> None:
        self.waiting = waiting
        self.running = running
        self.being_computed = being_computed
        self.cached = cached
        self.rng = rng


def fcfs(round_: Round) -> SortKey:
    """First come first served."""
    return lambda req: 0


def lpm(round_: Round) -> SortKey:
    """Longest prefix match first: those who have least left to compute of their prompt's beginning."""
    return lambda req: -round_.cached.peek(req).num_pages


def dfs_weight(round_: Round) -> SortKey:
    """Depth first through the RadixCache, subtrees with most waiting requests first."""
    position = dfs_positions(round_.waiting, round_.cached.peek)
    return lambda req: position[req]


def lof(round_: Round) -> SortKey:
    """Longest output first: by the tokens that may still be generated, on whichever node."""
    return lambda req: req.output_len - req.params.max_new_tokens


def shuffled(round_: Round) -> SortKey:
    """In random order, drawn anew for every decision."""
    return lambda req: round_.rng.random()


def routing_key(round_: Round) -> SortKey:
    """The routing key that is most frequent among the running first, ties by key; then those without a match.

    Who is being prefilled runs as well: a prefill node has no other running requests.
    """
    running = [*round_.running, *round_.being_computed]
    count = Counter(req.work.routing_key for req in running if req.work.routing_key)
    return lambda req: (0, -count[key], key) if (key := req.work.routing_key) in count else (1,)


POLICIES: dict[str, Callable[[Round], SortKey]] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "dfs-weight": dfs_weight,
    "lof": lof,
    "random": shuffled,
    "routing-key": routing_key,
}
CACHE_AWARE = frozenset({"lpm", "dfs-weight"})


class SchedulePolicy:
    """The configured policy, adjusted to what there is: one object for each Batcher."""

    def __init__(
        self, options: ScheduleOptions, ledger: KVLedger, priority: PriorityRule, cached: CachedPrefixes
    ) -> None:
        self._options = options
        self._priority = priority
        self._cached = cached
        self._rng = random.Random(options.random_seed)
        self._configured = options.schedule_policy
        self._logged = False
        if self._configured in CACHE_AWARE and not ledger.keep_prefixes:
            self._configured = "fcfs"
            self._log_once("the RadixCache is off")

    def acts_as(self, num_waiting: int) -> str:
        """The policy in effect while so many wait: the configured one, adjusted."""
        if self._configured == "lpm" and num_waiting > LPM_MAX_WAITING:
            self._log_once(f"more than {LPM_MAX_WAITING} requests wait")
            return "fcfs"
        return self._configured

    def order(
        self, waiting: Sequence[Req], running: Sequence[Req], being_computed: Sequence[Req], step: int
    ) -> list[Req]:
        """Who is offered to the PrefillAdder now, in which order. `being_computed` is chunked, or in flight."""
        policy = self.acts_as(len(waiting))
        round_ = Round(waiting, running, being_computed, self._cached, self._rng)
        key, level = POLICIES[policy](round_), self._priority.level

        def full_key(req: Req) -> tuple[Any, ...]:
            return (-level(req, step), 0) if req.num_retractions else (-level(req, step), 1, key(req))

        return sorted(waiting, key=full_key)

    def _log_once(self, reason: str) -> None:
        if not self._logged:
            self._logged = True
            policy = self._options.schedule_policy
            log.event("schedule_policy_adjusted", policy=policy, acts_as="fcfs", reason=reason)
