"""Routing policies, which choose one of the nodes that could serve a request.

A policy is a function from `Candidates` to one of their nodes; POLICIES has its name. A new policy touches this file
only. Policies keep nothing between requests: `Candidates` has everything that a decision depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from router.dispatch.estimate import RequestEstimates
from router.dispatch.node import Node
from shared.protocol.messages import Role

MAX_IMBALANCE = 16
"""A node's cached prefix does not count if the node has more than so many sequences beyond the idlest node's."""

MIN_SAVED_SHARE = 0.25
MIN_SAVED_TOKENS = 1024
"""A cached prefix counts if it has this share of the tokens, or so many tokens. A shorter one saves little, and one
such as the chat template's, with which all prompts begin, would draw all requests to its node."""

NEARLY = 0.1
NEARLY_S = 0.001
"""Estimates within this share and so many seconds of the best are as good."""


MAX_COMPARED = 64
"""`ttft` estimates so many nodes of a role at most: with 500 of each, that takes a third of the time of all."""


@dataclass(frozen=True)
class Candidates:
    """The input of a policy: the nodes that could serve a request, and what the router knows of it and of them.

    `nodes` is not empty; they are live, of one role, and have room for the request. `last` is the node_id of the node
    that was chosen for the request before, in the same role. Where decode nodes are chosen from, `prefill_s` is how
    long another node takes to compute the prompt; None: no other node can. `local_prefill_tokens` decides which of
    them compute it by themselves (`RequestEstimates.local_limit`).
    """

    request: RequestEstimates
    nodes: Sequence[Node]
    last: str
    random: Random
    prefill_s: float | None = None
    local_prefill_tokens: int | None = None


RoutingPolicy = Callable[[Candidates], Node]


def random(candidates: Candidates) -> Node:
    """Any node."""
    return candidates.random.choice(candidates.nodes)


def round_robin(candidates: Candidates) -> Node:
    """The nodes take turns by name, so that a fleet that changes stays balanced."""
    return _next_in_turn(candidates.nodes, candidates.last)


def power_of_two(candidates: Candidates) -> Node:
    """The less loaded of two nodes drawn at random (Mitzenmacher 2001)."""
    nodes = candidates.nodes
    return min(candidates.random.sample(nodes, min(2, len(nodes))), key=candidates.request.load)


def least_load(candidates: Candidates) -> Node:
    """The node with the least load; those with equal loads take turns."""
    return _next_of_least(candidates, list(map(candidates.request.load, candidates.nodes)), margin=0)


def cache_aware(candidates: Candidates) -> Node:
    """The nodes that hold most of the sequence take turns; all nodes do if that saves little or those are busy."""
    return _next_in_turn(_holding_most(candidates) or candidates.nodes, candidates.last)


def ttft(candidates: Candidates) -> Node:
    """The node with the smallest estimated time to first token, as Mooncake's Conductor chooses (Qin et al. 2024).

    prefill node    computing what waits there, then what it does not hold
    decode node     computing there what it does not hold if it is to do so, else waiting for the prefill fleet and
                    the transfer; and what the place there costs

    Nodes about as good as the best take turns: estimates are rough, and several routers must not all choose one node.
    Of a large fleet, `compared` are estimated.
    """
    candidates = replace(candidates, nodes=compared(candidates))
    costs_s = _decode_s if candidates.nodes[0].role is Role.DECODE else _prefill_s
    costs = [costs_s(candidates, node) for node in candidates.nodes]
    return _next_of_least(candidates, costs, margin=NEARLY_S + NEARLY * min(costs))


def compared(candidates: Candidates) -> Sequence[Node]:
    """All nodes. Of more than MAX_COMPARED, half as many are drawn from those that hold most, and half from all."""
    nodes, half = candidates.nodes, MAX_COMPARED // 2
    if len(nodes) <= MAX_COMPARED:
        return nodes
    holders = candidates.request.narrowed(*_holders(candidates), half)
    draw = candidates.random.sample
    return list(dict.fromkeys((*draw(holders, min(half, len(holders))), *draw(nodes, half))))


POLICIES: dict[str, RoutingPolicy] = {
    "ttft": ttft,
    "cache-aware": cache_aware,
    "least-load": least_load,
    "power-of-two": power_of_two,
    "round-robin": round_robin,
    "random": random,
}


def _prefill_s(candidates: Candidates, node: Node) -> float:
    return candidates.request.prefill_s(node)


def _decode_s(candidates: Candidates, node: Node) -> float:
    request, prefill_s, most = candidates.request, candidates.prefill_s, candidates.local_prefill_tokens
    if prefill_s is None or request.local_limit(node, prefill_s, most) is not None:
        first_token_s = request.local_prefill_s(node)
    else:
        first_token_s = max(prefill_s, request.transfer_s(node))
    return first_token_s + request.place_s(node)


def _next_of_least(candidates: Candidates, costs: Sequence[float], margin: float) -> Node:
    most = min(costs) + margin
    least = [node for node, cost in zip(candidates.nodes, costs, strict=True) if cost <= most]
    return _next_in_turn(least, candidates.last)


def _next_in_turn(nodes: Sequence[Node], last: str) -> Node:
    in_turn = sorted(nodes, key=lambda node: node.ref.node_id)
    return next((node for node in in_turn if node.ref.node_id > last), in_turn[0])


def _holding_most(candidates: Candidates) -> Sequence[Node]:
    """The nodes, among those not too busy, that hold most pages; empty when no node holds enough of them.

    A node that does not hold enough pages costs one lookup.
    """
    nodes, request = candidates.nodes, candidates.request
    most_pages, holders = _holders(candidates)
    if not holders:
        return ()
    most_seqs = min(map(request.num_seqs, nodes)) + MAX_IMBALANCE
    best: list[Node] = []
    for node in holders:
        if request.num_seqs(node) > most_seqs:
            continue
        num_pages = request.num_cached_pages(node, most_pages)
        if num_pages > most_pages:
            most_pages, best = num_pages, []
        if num_pages == most_pages:
            best.append(node)
    return best


def _holders(candidates: Candidates) -> tuple[int, Sequence[Node]]:
    """The pages that are worth something if a node holds them, and the nodes that do. One lookup a node."""
    nodes, request = candidates.nodes, candidates.request
    num_pages = ceil(min(MIN_SAVED_SHARE * request.num_tokens, MIN_SAVED_TOKENS) / nodes[0].page_size)
    if not any(len(node.prefixes) for node in nodes) or num_pages > len(request.page_hashes):
        return num_pages, ()
    last = request.page_hashes[num_pages - 1]
    return num_pages, [node for node in nodes if last in node.prefixes]
