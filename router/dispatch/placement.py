"""Chooses the nodes of a request (P a prefill node, D a decode node).

    at most one new token           P alone      no node needs the KV afterwards
    short prompt, or short suffix   D alone      computing it there is cheaper than moving its pages
    otherwise                       P and D      D reserves pages, P computes, and hands over what D has not got
    no live P, or none linked to D  D alone      degraded, but served

The suffix of a sequence is what the decode node's RadixCache does not hold, as its cache events tell. Among several
nodes of a role, its routing policy chooses: a function of POLICIES, which keeps nothing between requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from random import Random

from router.dispatch.estimate import Fetch, FirstToken, RequestEstimates
from router.dispatch.fleet_view import FleetView, room
from router.dispatch.node import Node, Numerics
from shared.errors import RequestError, maximum_context
from shared.protocol.messages import Role, Work

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


@dataclass(frozen=True)
class Route:
    """The nodes of one attempt, and the `max_new_tokens` that they have room for.

    A decode node that was chosen for a cached prefix gets a `local_prefill_limit`. If it would have to compute more
    tokens, it answers NotCached. The first of the nodes computes the prompt, of which it is expected to lack
    `num_queued_tokens`. Each node needs `num_pages` for what is known of the sequence. `first_token` is None while
    no node has measured how fast it prefills. The `fetch` is one of the prefill node.
    """

    max_new_tokens: int
    prefill: Node | None
    decode: Node | None
    num_queued_tokens: int
    num_pages: int
    first_token: FirstToken | None
    fetch: Fetch | None = None
    local_prefill_limit: int | None = None
    evicts_first: Node | None = None
    """Which of two nodes evicts the prompt before all other prefixes, since the other one keeps it."""
    why: str = ""
    """Why these roles take part, for the log."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that take part."""
        return tuple(node for node in (self.prefill, self.decode) if node is not None)

    @property
    def numerics(self) -> Numerics:
        """Of the node that computes the prompt, and of the one that computes the output."""
        nodes = self.nodes
        return Numerics(nodes[0].numerics, nodes[-1].numerics)

    def continues(self, numerics: Numerics) -> bool:
        """Whether it computes what is known of a sequence, with output of these `numerics`, to the same bits."""
        is_exact = all(node.is_exact for node in self.nodes)
        return is_exact and self.numerics == numerics and numerics.prompt == numerics.output


class Placement:
    """Finds the route of each request from what is in the `view`, and changes nothing there.

    `policies` has one for each role; they draw from `random`. A decode node prefills by itself what has at most
    `local_prefill_tokens`; None: what it computes sooner than a prefill node would, if it holds the beginning.
    """

    def __init__(
        self,
        view: FleetView,
        *,
        policies: Mapping[Role, RoutingPolicy],
        local_prefill_tokens: int | None,
        random: Random,
    ) -> None:
        self._view = view
        self._policies = policies
        self._local_prefill_tokens = local_prefill_tokens
        self._random = random

    def route(
        self,
        work: Work,
        *,
        split: bool,
        again: bool = False,
        avoid: Collection[str] = (),
        like: Numerics | None = None,
    ) -> Route:
        """The nodes for the next attempt at `work`. With `split`, a prefill node takes part if one is live.

        The first attempt clips max_new_tokens to the room on its nodes. A later one (`again`) needs room for all of
        them, since the first has fixed the number. Of the incarnations to `avoid`, a decode node is chosen when there
        is no other, and then prefills by itself. Nodes of the numerics `like` are preferred. Raises RequestError when
        no node can take the request.
        """
        num_outputs, num_known = len(work.output_ids), len(work.input_ids) + len(work.output_ids)
        wanted = work.params.max_new_tokens - num_outputs
        prefills = [
            prefill
            for prefill in self._view.with_room(Role.PREFILL, num_known + min(wanted, 1))
            if prefill.ref.incarnation not in avoid
        ]
        decodes = self._view.with_room(Role.DECODE, num_known + (wanted if again else min(wanted, 1)))
        request = RequestEstimates(work, self._view, self._random, self._local_prefill_tokens)
        if wanted <= 1:
            exact = [p for p in prefills if like in (None, Numerics(p.numerics, p.numerics))]
            if last := exact or (prefills if not decodes else []):
                last_token = self._choose(request, last)
                return self._route(request, work.params.max_new_tokens, last_token, None, why="one new token")
            prefills = []  # a decode node computes the last token
        if not decodes:
            raise self._refusal(work, again=again)
        prefills = [prefill for prefill in prefills if like is None or prefill.numerics == like.prompt]
        prefill = self._choose(request, prefills) if prefills else None
        decodes = _preferred(decodes, avoid, like)
        request.elsewhere_s = request.prefill_s(prefill) if prefill is not None else None
        decode = self._choose(request, decodes)
        wanted = min(wanted, room(decode) - num_known)
        max_new_tokens = num_outputs + wanted
        if decode.ref.incarnation in avoid:
            prefill = None
        elif prefill is not None and why_unlinked(prefill, decode) is not None:
            prefills = [prefill for prefill in prefills if why_unlinked(prefill, decode) is None]
            prefill = self._choose(request, prefills) if prefills else None
        if prefill is None:
            return self._route(request, max_new_tokens, None, decode, why="no prefill node can take part")
        request.elsewhere_s = request.prefill_s(prefill)
        limit = request.local_limit(decode)
        if not split and limit is not None:
            limit = limit if request.num_cached_pages(decode) else None
            return self._route(request, max_new_tokens, None, decode, limit, why="the decode node is sooner")
        return self._route(request, max_new_tokens, prefill, decode if wanted > 1 else None, why="split")

    def route_alone(self, work: Work, *, avoid: Collection[str], like: Numerics | None) -> Route:
        """The decode node with the fewest sequences alone. Raises RequestError if there is none.

        `avoid` and `like` are those of `route`.
        """
        num_tokens = len(work.input_ids) + work.params.max_new_tokens
        decodes = self._view.with_room(Role.DECODE, num_tokens)
        if not decodes:
            raise self._refusal(work, again=True)
        decodes = _preferred(decodes, avoid, like)
        least = min(decodes, key=self._view.seqs.of)
        request = RequestEstimates(work, self._view, self._random, self._local_prefill_tokens)
        return self._route(request, work.params.max_new_tokens, None, least, why="a suspect runs alone")

    @property
    def max_trials(self) -> int:
        """So many suspects are tried at a time, since each takes a decode node from other work."""
        return max(1, len(self._view.live(Role.DECODE)) // 2)

    def target(self, work: Work, source: Node, refusals: Mapping[str, int]) -> Node:
        """The decode node to which a sequence moves that runs on `source`, not one that is shunned.

        Nodes that have pages for it come first, and of those the ones with the fewest `refusals`, by incarnation: a
        target has its own margin, so it may refuse what fits by its Pong. Raises RequestError if there is no target.
        """
        num_tokens = len(work.input_ids) + work.params.max_new_tokens
        targets = [
            node
            for node in self._view.with_room(Role.DECODE, num_tokens)
            if node is not source
            and not self._view.suspicion.shuns(node)
            and node.numerics == source.numerics
            and why_unlinked(source, node) is None
        ]
        if not targets:
            raise self._refusal(work, again=True)
        # The source has computed what is known of the sequence, and the target computes none of it.
        request = RequestEstimates(work, self._view, self._random, local_prefill_tokens=0)
        request.elsewhere_s = 0.0
        targets = [node for node in targets if request.has_pages(node)] or targets
        fewest = min(refusals.get(node.ref.incarnation, 0) for node in targets)
        targets = [node for node in targets if refusals.get(node.ref.incarnation, 0) == fewest]
        return self._choose(request, targets)

    def _choose(self, request: RequestEstimates, nodes: Sequence[Node]) -> Node:
        """What the policy of their role chooses among `nodes`. Whether it takes part is decided later."""
        return self._policies[nodes[0].role](request, nodes)

    def _route(
        self,
        request: RequestEstimates,
        max_new_tokens: int,
        prefill: Node | None,
        decode: Node | None,
        local_prefill_limit: int | None = None,
        *,
        why: str,
    ) -> Route:
        """The route over the nodes that take part, at least one."""
        first = prefill or decode
        assert first is not None
        num_pages = ceil(request.num_tokens / first.page_size)
        fetch, num_queued_tokens = request.fetch(first), request.num_missing_tokens(first)
        if fetch is not None and fetch.is_linked:
            num_queued_tokens = fetch.num_left_tokens
        return Route(
            max_new_tokens,
            prefill,
            decode,
            num_queued_tokens,
            num_pages,
            request.first_token(first),
            fetch,
            local_prefill_limit,
            self._draw_evicting(prefill, decode),
            why,
        )

    def _draw_evicting(self, prefill: Node | None, decode: Node | None) -> Node | None:
        """Draws which fleet keeps a prompt that both will have cached: in proportion to what it can keep.

        If both kept it, they would hold the same prompts, and half of their pages would be worth nothing.
        """
        if prefill is None or decode is None:
            return None
        rooms = [_cache_pages(node) * len(self._view.live(node.role)) for node in (prefill, decode)]
        return self._random.choices((decode, prefill), rooms if any(rooms) else None)[0]

    def _refusal(self, work: Work, *, again: bool) -> RequestError:
        live = self._view.live(Role.DECODE)
        if not live:
            return RequestError(self._view.why_none(Role.DECODE), status=503, code="no_node")
        most = max(map(room, live))
        if again:
            total = len(work.input_ids) + work.params.max_new_tokens
            message = f"no decode node is left that has room for {total} tokens; the largest has {most}"
            return RequestError(message, status=503, code="no_node")
        return RequestError(
            f"{maximum_context(most)}, prompt and output together; the prompt has {len(work.input_ids)} tokens, "
            "which leaves no room for output",
            code="context_length_exceeded",
        )


def why_unlinked(prefill: Node, decode: Node) -> str | None:
    """Why no pages can move between two nodes now, by the Pong of either. None also for a new pair."""
    theirs, ours = prefill.load.unreachable, decode.load.unreachable
    return theirs.get(decode.ref.incarnation) or ours.get(prefill.ref.incarnation)


def _preferred(decodes: list[Node], avoid: Collection[str], like: Numerics | None) -> list[Node]:
    """Those of `decodes` that are not to be avoided, and of them those of the numerics `like`, if there are any."""
    decodes = [decode for decode in decodes if decode.ref.incarnation not in avoid] or decodes
    if like is None:
        return decodes
    return [decode for decode in decodes if decode.numerics == like.output] or decodes


def _cache_pages(node: Node) -> int:
    """Pages of a node in which prefixes are cached, or may be."""
    return node.load.num_free_pages + node.load.num_evictable_pages


# ------------------------------------------------------------------------------------------ routing policies
def at_random(request: RequestEstimates, nodes: Sequence[Node]) -> Node:
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
    "random": at_random,
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
