"""The order in which waiting requests are offered to the PrefillAdder.

The key of the policy decides, and arrival between equals: a policy makes a sort key of the queue, and a smaller key
goes first. Two things lead the key of every policy: the request's class (see `PriorityRule`), and whether the request
ran before, here or on a node that could not go on with it, since it came earlier and its client has read a part of
its output.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shared import log
from shared.config import ScheduleOptions

if TYPE_CHECKING:  # the command line reads the names of the policies from here, and does not wait for torch
    from shared.kvcache.ledger import KVLedger
    from shared.kvcache.radix_cache import Peek, TreeNode
    from shared.scheduling.req import Req

WouldFit: TypeAlias = "Callable[[Req, Sequence[Req]], bool]"
"""Whether a request would find room if others, which run, were retracted."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits outside the Batcher for room to receive its KV; `would_fit` judges that room."""

    req: Req
    would_fit: WouldFit


class PriorityRule:
    """The level of a request, which leads the sort key of every policy, and the victims of a waiting request.

    The level is the priority (0 unless priority scheduling is on) plus one for every `priority_aging_steps` forwards
    since the request arrived: the aging of multilevel feedback queues. So no request starves:
    (d + 1) * priority_aging_steps forwards after its arrival, a request goes before every new one whose priority is
    higher by d, and can no longer be retracted for it. Age is counted in forwards, not in seconds, so the same
    messages give the same decisions.
    """

    def __init__(self, options: ScheduleOptions) -> None:
        self.enabled = options.enable_priority_scheduling
        """Whether the priorities that clients gave count. Age always does."""
        self._sign = -1 if options.schedule_low_priority_values_first else 1
        self._aging_steps = options.priority_aging_steps
        self._threshold = options.priority_scheduling_preemption_threshold

    def level(self, req: Req, step: int) -> int:
        """Higher goes first. `step` is the number of forwards launched so far."""
        if not self._aging_steps or req.arrival_step is None:
            return self.given(req)
        return self.given(req) + (step - req.arrival_step) // self._aging_steps

    def rank(self, req: Req, step: int) -> tuple[int, bool, int]:
        """The order between requests of different queues: smaller goes first, and no two are equal.

        The level leads where priorities count. Then come requests that ran before, since they arrived earlier than
        any new one, though elsewhere; and then the order of arrival, from which the level follows.
        """
        return -self.level(req, step) if self.enabled else 0, not req.is_resumed, req.arrival_number

    def in_order(self, reqs: Sequence[Req], step: int) -> Sequence[Req]:
        """`reqs`, which are in order of arrival, by rank."""
        if self.enabled:
            return sorted(reqs, key=lambda req: (-self.level(req, step), not req.is_resumed))
        return sorted(reqs, key=lambda req: not req.is_resumed)

    def may_preempt(self, waiting: Req, running: Req, step: int) -> bool:
        """Whether `running` may be retracted for `waiting`. Age protects `running` and does not help `waiting`."""
        return self.enabled and self.given(waiting) - self.level(running, step) > self._threshold

    def may_preempt_any(self, waiting: Sequence[Req], running: Sequence[Req], step: int) -> bool:
        """Whether any of `waiting` may have any of `running` retracted."""
        if not (self.enabled and waiting and running):
            return False
        lowest = min(self.level(req, step) for req in running)
        return max(self.given(req) for req in waiting) - lowest > self._threshold

    def victims_for(self, waiting: Req, running: Sequence[Req], would_fit: WouldFit, step: int) -> list[Req]:
        """The requests of `running` that are retracted for `waiting`: lowest level first, then those that lose least.

        Empty when `waiting` would not fit even then.
        """
        candidates = sorted(
            (other for other in running if self.may_preempt(waiting, other, step)),
            key=lambda req: (self.level(req, step), req.output_len, -req.num_input_ids, str(req.key)),
        )
        return choose_victims(candidates, lambda some: would_fit(waiting, some))

    def given(self, req: Req) -> int:
        """The priority without what waiting has added to it."""
        return self._sign * req.work.priority if self.enabled else 0


def choose_victims(candidates: Sequence[Req], makes_room: Callable[[Sequence[Req]], bool]) -> list[Req]:
    """The first few of `candidates` that make room, without those among them that are not needed for it.

    Empty when not even all of them make room. `makes_room` must not turn false when a candidate is added.
    """
    if not candidates or not makes_room(candidates):
        return []
    num_needed = bisect_left(range(len(candidates)), True, key=lambda n: makes_room(candidates[:n]))
    victims = list(candidates[:num_needed])
    for spared in reversed(victims[:-1]):
        others = [victim for victim in victims if victim is not spared]
        if makes_room(others):
            victims = others
    return victims


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
        """The order in which `waiting` is offered to the PrefillAdder. `being_computed` is chunked, or in flight."""
        policy = self.acts_as(len(waiting))
        round_ = Round(waiting, running, being_computed, self._cached, self._rng)
        key, level = POLICIES[policy](round_), self._priority.level

        def full_key(req: Req) -> tuple[Any, ...]:
            return (-level(req, step), 0) if req.is_resumed else (-level(req, step), 1, key(req))

        return sorted(waiting, key=full_key)

    def _log_once(self, reason: str) -> None:
        if not self._logged:
            self._logged = True
            policy = self._options.schedule_policy
            log.event("schedule_policy_adjusted", policy=policy, acts_as="fcfs", reason=reason)


class CachedPrefixes:
    """What the RadixCache holds of each waiting request's prompt, cached until the tree changes or the request ends.

    Looking a prefix up does not count as a use, so it does not refresh the LRU.
    """

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._found: dict[Req, tuple[int, Peek]] = {}
        """The prefix of each request, and how many of its tokens could be cached."""
        self._num_changes = -1
        """How often the RadixCache had changed when `_found` was found."""

    def peek(self, req: Req) -> Peek:
        """The longest cached prefix that `req` could use."""
        if self._num_changes != self._ledger.radix_cache.num_changes:
            self._num_changes = self._ledger.radix_cache.num_changes
            self._found = {}
        ids = req.matchable_ids
        num_ids, peek = self._found.get(req, (-1, None))
        if peek is None or num_ids != len(ids):
            peek = self._ledger.peek_prefix(ids, req.extra_key)
            self._found[req] = len(ids), peek
        return peek

    def forget(self, req: Req) -> None:
        """Drop what was found for a request that has ended."""
        self._found.pop(req, None)

    def peek_to_lock(self, req: Req) -> Peek:
        """The same prefix, in a node that ends with it."""
        self._ledger.radix_cache.cut_at(self.peek(req))
        return self.peek(req)

    def num_tokens(self, req: Req) -> int:
        """The length of that prefix."""
        return self.peek(req).num_pages * self._ledger.page_size


class InBatchPrefix:
    """In-batch prefix caching: of several requests that share an uncached prefix, one (the leader) computes it.

    The RadixCache learns of a prefix when its KV is computed. A request admitted before that would compute it once
    more, so a follower waits while its leader computes enough of what it lacks: for a forward, or for the chunks that
    are left of the prefix. SGLang does this under lpm and dfs-weight, among the requests that wait. Here the policy
    does not matter, and leaders are the requests whose prefix is being computed, in this batch or in flight.

    Nothing is remembered: if a leader ends early, the next decision sees it. No follower starves: a leader counts no
    less than its follower (`PriorityRule.level`), so an aged follower waits for no later request, and the earlier
    ones end. Retracted requests do not wait, since they resume first come first served.
    """

    def __init__(
        self, ledger: KVLedger, options: ScheduleOptions, priority: PriorityRule, cached: CachedPrefixes
    ) -> None:
        self._level = priority.level
        self._cached = cached
        self._enabled = ledger.keep_prefixes
        self._page_size = ledger.page_size
        self._worth_tokens = ledger.page_size * ledger.pages_for(
            options.in_batch_prefix_caching_deprioritize_threshold
        )

    def shared_tokens(self, req: Req, leaders: Iterable[Req], step: int) -> int:
        """Tokens of the prefix that `req` waits for, cached ones included; 0 when waiting is not worth it.

        `leaders` are being computed. One that adds nothing to what `req` lacks costs a comparison of few tokens, any
        other O(shared tokens).
        """
        if not self._enabled or req.num_retractions or len(req.matchable_ids) <= self._worth_tokens:
            return 0
        level = self._level(req, step)
        shared = max(
            (
                _shared_pages(other.ids, req.matchable_ids, self._page_size) * self._page_size
                for other in leaders
                if self._adds_enough(other, req) and self._level(other, step) >= level
            ),
            default=0,
        )
        return shared if shared and shared - self._cached.num_tokens(req) >= self._worth_tokens else 0

    def _adds_enough(self, other: Req, req: Req) -> bool:
        # What `other` adds to the RadixCache begins where its own committed KV ends; what comes before is cached
        # for both. So requests that share only a system prompt, which is cached already, are told apart here.
        committed = other.kv.kv_committed_len if other.kv else 0
        begin = committed // self._page_size * self._page_size
        end = begin + self._worth_tokens
        ids = req.matchable_ids
        return end < len(ids) and other.extra_key == req.extra_key and other.ids[begin:end] == ids[begin:end]


def _shared_pages(theirs: Sequence[int], ids: Sequence[int], page_size: int) -> int:
    """Whole pages with which both begin, without the last of `ids`: found by halving."""
    least, most = 0, min(len(theirs), len(ids) - 1) // page_size
    while least < most:
        middle = (least + most + 1) // 2
        begin, end = least * page_size, middle * page_size
        if theirs[begin:end] == ids[begin:end]:
            least = middle
        else:
            most = middle - 1
    return least


# ------------------------------------------------------------------------------------------ the policies
SortKey: TypeAlias = "Callable[[Req], Any]"


@dataclass(frozen=True, slots=True)
class Round:
    """What the policies look at in one scheduling decision. `waiting` is in order of arrival."""

    waiting: Sequence[Req]
    running: Sequence[Req]
    being_computed: Sequence[Req]
    cached: CachedPrefixes
    rng: random.Random


def fcfs(round_: Round) -> SortKey:
    """First come first served."""
    return lambda req: 0


def lpm(round_: Round) -> SortKey:
    """Longest prefix match first: requests with the longest cached beginning."""
    return lambda req: -round_.cached.peek(req).num_pages


def dfs_positions(waiting: Sequence[Req], match_of: Callable[[Req], Peek]) -> dict[Req, int]:
    """The place of each request in a depth-first walk that enters heavier subtrees first.

    The weight of a node is the number of waiting requests whose match ends in it or below. Children come before
    the requests of their parent, and longer matches within a node before shorter ones. Of two subtrees of the same
    weight the one with the earliest arrival goes first. Looks only at nodes above a match: O(requests * depth).
    """
    ending: dict[TreeNode, list[Req]] = {}
    children: dict[TreeNode, list[TreeNode]] = {}
    weight: dict[TreeNode, int] = {}
    root: TreeNode | None = None
    for req in waiting:
        node: TreeNode | None = match_of(req).node
        assert node is not None
        ending.setdefault(node, []).append(req)
        while node is not None:
            if node.parent is None:
                root = node
            elif node not in weight:
                children.setdefault(node.parent, []).append(node)
            weight[node] = weight.get(node, 0) + 1
            node = node.parent
    # Parents, then children from the lightest to the heaviest, read backwards: an order without recursion, since
    # the tree may be deep.
    found: list[Req] = []
    stack = [root] if root is not None else []
    while stack:
        node = stack.pop()
        found += sorted(ending.get(node, ()), key=lambda req: -match_of(req).num_pages)[::-1]
        stack += sorted(children.get(node, ()), key=lambda child: -weight[child])
    return {req: place for place, req in enumerate(reversed(found))}


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
    """The routing key that is most frequent among the running requests first, then by key, so that equal keys meet.

    On an idle node, where no key is frequent, requests are thus grouped as well. A request that is being prefilled
    counts as running: a prefill node has no others.
    """
    running = [*round_.running, *round_.being_computed]
    count = Counter(req.work.routing_key for req in running if req.work.routing_key)
    return lambda req: (-count[req.work.routing_key], req.work.routing_key)


POLICIES: dict[str, Callable[[Round], SortKey]] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "dfs-weight": dfs_weight,
    "lof": lof,
    "random": shuffled,
    "routing-key": routing_key,
}
