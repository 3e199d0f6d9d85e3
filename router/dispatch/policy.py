"""Routing policies, which choose one of the nodes that could serve a request.

A policy is a function from `Candidates` to one of their nodes; POLICIES has its name. A new policy touches this file
only. Policies keep nothing between requests: `Candidates` has everything that a decision depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import ceil

from router.dispatch.node_counts import NodeCounts
from router.dispatch.running_req import Node
from shared.protocol.block_hash import BlockHashes
from shared.protocol.messages import NodeRef, Work

MAX_IMBALANCE = 16
"""A node's cached prefix does not count if the node has more than so many sequences beyond the idlest node's."""

MIN_SAVED_SHARE = 0.25
MIN_SAVED_TOKENS = 1024
"""A cached prefix counts if it has this share of the tokens, or so many tokens. A shorter one saves little, and one
such as the chat template's, with which all prompts begin, would draw all requests to its node."""


class Candidates:
    """The input of a policy: a request, the nodes that could serve it, and what the router knows of each node.

    `nodes` is not empty; they are live and have room for the request. `last` is the node_id of the node that was
    chosen for the request before, in the same role.
    """

    def __init__(self, work: Work, nodes: Sequence[Node], counts: NodeCounts, last: str) -> None:
        self.work = work
        self.nodes = nodes
        self.last = last
        self._counts = counts
        self._num_cached_pages: dict[NodeRef, int] = {}

    def num_seqs(self, node: Node) -> int:
        """The number of sequences on `node`. Those of other routers are as of its latest Pong."""
        return self._counts.num_seqs(node)

    @cached_property
    def page_hashes(self) -> Sequence[int]:
        """The block hashes of the pages whose KV could come from a cache. Each is computed when it is first read."""
        return BlockHashes(_matchable_ids(self.work), self.nodes[0].page_size, self.work.extra_key)

    def num_cached_pages(self, node: Node, at_least: int = 0) -> int:
        """Pages of the sequence that `node` holds; 0 if they are fewer than `at_least`, which is one lookup."""
        known = self._num_cached_pages.get(node.ref)
        if known is None:
            known = node.prefixes.num_blocks(self.page_hashes, at_least) if len(node.prefixes) else 0
            if known or not at_least:
                self._num_cached_pages[node.ref] = known
        return known

    def num_cached_tokens(self, node: Node) -> int:
        """Tokens of the sequence whose KV `node` holds."""
        return self.num_cached_pages(node) * node.page_size


RoutingPolicy = Callable[[Candidates], Node]


def round_robin(candidates: Candidates) -> Node:
    """The nodes take turns by name, so that a fleet that changes stays balanced."""
    return _next_in_turn(candidates.nodes, candidates.last)


def cache_aware(candidates: Candidates) -> Node:
    """The nodes that hold most of the sequence take turns; all nodes do if that saves little or those are busy."""
    return _next_in_turn(_holding_most(candidates) or candidates.nodes, candidates.last)


POLICIES: dict[str, RoutingPolicy] = {"cache_aware": cache_aware, "round_robin": round_robin}


def _next_in_turn(nodes: Sequence[Node], last: str) -> Node:
    in_turn = sorted(nodes, key=lambda node: node.ref.node_id)
    return next((node for node in in_turn if node.ref.node_id > last), in_turn[0])


def _holding_most(candidates: Candidates) -> Sequence[Node]:
    """The nodes, among those not too busy, that hold most pages; empty when no node holds enough of them.

    A node that does not hold enough pages costs one lookup.
    """
    nodes = candidates.nodes
    if not any(len(node.prefixes) for node in nodes):
        return ()
    num_tokens = len(candidates.work.input_ids) + len(candidates.work.output_ids)
    most_pages = ceil(min(MIN_SAVED_SHARE * num_tokens, MIN_SAVED_TOKENS) / nodes[0].page_size)
    if most_pages > len(candidates.page_hashes):
        return ()
    holders = [node for node in nodes if candidates.page_hashes[most_pages - 1] in node.prefixes]
    if not holders:
        return ()
    most_seqs = min(map(candidates.num_seqs, nodes)) + MAX_IMBALANCE
    best: list[Node] = []
    for node in holders:
        if candidates.num_seqs(node) > most_seqs:
            continue
        num_pages = candidates.num_cached_pages(node, most_pages)
        if num_pages > most_pages:
            most_pages, best = num_pages, []
        if num_pages == most_pages:
            best.append(node)
    return best


def _matchable_ids(work: Work) -> tuple[int, ...]:
    """The tokens whose KV may come from a cache: all but the last, which is computed for the next token.

    Prompt tokens whose logprobs are wanted are computed, until those have come with output position 0.
    """
    ids = work.input_ids + work.output_ids
    if work.params.logprobs is None or work.output_ids:
        return ids[:-1]
    return ids[: work.params.logprobs.num_matchable(len(ids))]
