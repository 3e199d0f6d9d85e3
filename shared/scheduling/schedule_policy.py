"""The order in which waiting requests are offered to the PrefillAdder.

The key of the policy decides, and arrival between equals. Two things lead the key of every policy: the request's
class (priority and waiting, see `priority`), and whether the request was retracted, since it came earlier and its
client has read a part of its output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from shared import log
from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.cached_prefixes import CachedPrefixes
from shared.scheduling.policies import POLICIES, Round
from shared.scheduling.priority import PriorityRule
from shared.scheduling.req import Req

LPM_MAX_WAITING = 128
"""With more requests waiting `lpm` acts as `fcfs`: matching costs O(requests * prompt length) every step."""
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
