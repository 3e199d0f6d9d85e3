"""What --schedule-policy can be: each policy makes a sort key of the waiting queue. A smaller key goes first.

The command line reads the names from here, so nothing is imported that is slow to import.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from shared.kvcache.radix_cache import Peek, TreeNode
    from shared.scheduling.req import Req
    from shared.scheduling.schedule_policy import CachedPrefixes

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
