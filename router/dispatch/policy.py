"""Routing policies, which choose one of the nodes that could serve a request.

A policy is a function from a request and nodes to one of the nodes; POLICIES has its name. A new policy touches this
file only. Policies keep nothing between requests: `RequestEstimates` has everything that a decision depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

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


RoutingPolicy = Callable[[RequestEstimates, Sequence[Node]], Node]
"""Chooses one of the nodes, which is not empty: they are live, of one role, and have room for the request."""


def random(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """Any node."""
    return request.random.choice(nodes)


def round_robin(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """The nodes take turns by name, so that a fleet that changes stays balanced."""
    last = request.last_chosen(nodes[0].role)
    in_turn = sorted(nodes, key=lambda node: node.ref.node_id)
    return next((node for node in in_turn if node.ref.node_id > last), in_turn[0])


def power_of_two(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """The less loaded of two nodes drawn at random (Mitzenmacher 2001)."""
    return min(request.random.sample(nodes, min(2, len(nodes))), key=request.load)


def least_load(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """The node with the least load; those with equal loads take turns."""
    return _next_of_least(request, nodes, list(map(request.load, nodes)), margin=0)


def cache_aware(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """The nodes that hold most of the sequence take turns; all nodes do if that saves little or those are busy."""
    return round_robin(request, _holding_most(request, nodes) or nodes)


def ttft(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
    """The node with the smallest estimated time to first token, as Mooncake's Conductor chooses (Qin et al. 2024).

    prefill node    computing what waits there, then what it does not hold
    decode node     computing there what it does not hold if it is to do so, else waiting for the prefill fleet and
                    the transfer; and what the place there costs

    Nodes about as good as the best take turns: estimates are rough, and several routers must not all choose one node.
    Of a large fleet, `compared` are estimated.
    """
    nodes = compared(request, nodes)
    cost_s = partial(_decode_s, request) if nodes[0].role is Role.DECODE else request.prefill_s
    costs = list(map(cost_s, nodes))
    return _next_of_least(request, nodes, costs, margin=NEARLY_S + NEARLY * min(costs))


def compared(request: RequestEstimates, nodes: Sequence[Node]) -> Sequence[Node]:
    """All nodes. Of more than MAX_COMPARED, half as many are drawn from those that hold most, and half from all."""
    half = MAX_COMPARED // 2
    if len(nodes) <= MAX_COMPARED:
        return nodes
    holders = request.narrowed(*_holders(request, nodes), half)
    draw = request.random.sample
    return list(dict.fromkeys((*draw(holders, min(half, len(holders))), *draw(nodes, half))))


POLICIES: dict[str, RoutingPolicy] = {
    "ttft": ttft,
    "cache-aware": cache_aware,
    "least-load": least_load,
    "power-of-two": power_of_two,
    "round-robin": round_robin,
    "random": random,
}


def _decode_s(request: RequestEstimates, node: Node) -> float:
    if request.elsewhere_s is None or request.local_limit(node) is not None:
        first_token_s = request.local_prefill_s(node)
    else:
        first_token_s = max(request.elsewhere_s, request.transfer_s(node))
    return first_token_s + request.place_s(node)


def _next_of_least(
    request: RequestEstimates, nodes: Sequence[Node], costs: Sequence[float], margin: float
) -> Node:
    most = min(costs) + margin
    return round_robin(request, [node for node, cost in zip(nodes, costs, strict=True) if cost <= most])


def _holding_most(request: RequestEstimates, nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes, among those not too busy, that hold most pages; empty when no node holds enough of them.

    A node that does not hold enough pages costs one lookup.
    """
    most_pages, holders = _holders(request, nodes)
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


def _holders(request: RequestEstimates, nodes: Sequence[Node]) -> tuple[int, Sequence[Node]]:
    """The pages that are worth something if a node holds them, and the nodes that do. One lookup a node."""
    num_pages = ceil(min(MIN_SAVED_SHARE * request.num_tokens, MIN_SAVED_TOKENS) / nodes[0].page_size)
    if not any(len(node.prefixes) for node in nodes) or num_pages > len(request.page_hashes):
        return num_pages, ()
    last = request.page_hashes[num_pages - 1]
    return num_pages, [node for node in nodes if last in node.prefixes]
