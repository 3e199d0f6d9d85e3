"""Who computes what of a request (P a prefill node, D a decode node).

    at most one new token           P alone      nobody needs the KV afterwards
    short prompt, or short suffix   D alone      computing it there is cheaper than moving its pages
    otherwise                       P and D      D reserves pages, P computes, and hands over what D has not got
    no live P                       D alone      degraded, but served

The suffix of a prompt is what the decode node's RadixCache does not hold, as its cache events tell. The decode nodes
that hold most of the prompt are preferred, if that is worth it and they are not much busier than the idlest; among
them, or among all where there are none, the policy chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from router.dispatch.node_counts import NodeCounts
from router.dispatch.policy import RoutingPolicy
from router.dispatch.running_req import Node
from router.http.wording import maximum_context
from shared.errors import RequestError
from shared.protocol.block_hash import BlockHashes
from shared.protocol.messages import Role

MAX_IMBALANCE = 16
"""Sequences that a node with a cached prefix may have more than the idlest, before its prefix counts for nothing."""

MIN_SAVED_SHARE = 0.25
MIN_SAVED_TOKENS = 1024
"""A cached prefix draws a prompt to its node when it is so much of the prompt, or so many tokens. Less, such as the
few tokens of a chat template that all prompts begin with, saves next to nothing, and would draw all of them."""


class Fleet(Protocol):
    """The nodes there are. Real: `membership.Membership`."""

    def live(self, role: Role) -> Sequence[Node]:
        """The nodes of a role that can be sent work now."""
        ...

    def why_none(self, role: Role) -> str:
        """Why `live(role)` is empty, for the client."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`max_new_tokens` that there is room for, and who computes them."""

    max_new_tokens: int
    prefill: Node | None
    decode: Node | None
    local_prefill_limit: int | None = None
    """The decode node was chosen for what it holds, and may not compute more of the prompt than this."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those who take part."""
        return tuple(node for node in (self.prefill, self.decode) if node is not None)


class Placement:
    """Chooses the nodes of each request."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        prefill_policy: RoutingPolicy,
        decode_policy: RoutingPolicy,
        local_prefill_tokens: int,
        counts: NodeCounts,
    ) -> None:
        self._fleet = fleet
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._local_prefill_tokens = local_prefill_tokens
        self._counts = counts

    def plan(
        self, input_ids: Sequence[int], wanted: int, extra_key: str, *, num_matchable: int, split: bool
    ) -> Plan:
        """Nodes for a prompt and `wanted` new tokens; `split` wants a prefill node, if there is one.

        Only the first `num_matchable` tokens of the prompt may come from a cache: never the last, which the first
        new token follows. Raises RequestError when nobody can take it.
        """
        prompt_len = len(input_ids)
        least = prompt_len + min(wanted, 1)
        prefills, decodes = self._with_room(Role.PREFILL, least), self._with_room(Role.DECODE, least)
        if wanted <= 1 and prefills:
            return Plan(max_new_tokens=wanted, prefill=self._prefill_policy.choose(prefills), decode=None)
        if not decodes:
            raise self._nobody(prompt_len)
        decode, num_cached = self._choose_decode(decodes, input_ids, num_matchable, extra_key)
        wanted = min(wanted, _room(decode) - prompt_len)
        if wanted <= 1 and prefills:
            return Plan(max_new_tokens=wanted, prefill=self._prefill_policy.choose(prefills), decode=None)
        if not prefills:
            return Plan(max_new_tokens=wanted, prefill=None, decode=decode)
        if split or prompt_len - num_cached > self._local_prefill_tokens:
            prefill = self._prefill_policy.choose(prefills)
            return Plan(max_new_tokens=wanted, prefill=prefill, decode=decode)
        limit = self._local_prefill_tokens if num_cached else None
        return Plan(max_new_tokens=wanted, prefill=None, decode=decode, local_prefill_limit=limit)

    def _choose_decode(
        self, decodes: Sequence[Node], input_ids: Sequence[int], num_matchable: int, extra_key: str
    ) -> tuple[Node, int]:
        """The decode node, and how many tokens of the prompt it need not compute."""
        if not any(len(node.prefixes) for node in decodes):
            return self._decode_policy.choose(decodes), 0
        page_size = decodes[0].page_size
        hashes = BlockHashes(input_ids[:num_matchable], page_size, extra_key)
        worth = min(MIN_SAVED_SHARE * len(input_ids), MIN_SAVED_TOKENS)
        best, num_blocks = self._holding_most(decodes, hashes, ceil(worth / page_size))
        if best:
            return self._decode_policy.choose(best), num_blocks * page_size
        chosen = self._decode_policy.choose(decodes)
        return chosen, chosen.prefixes.num_blocks(hashes) * page_size

    def _holding_most(
        self, decodes: Sequence[Node], hashes: Sequence[int], num_blocks: int
    ) -> tuple[Sequence[Node], int]:
        """The nodes, among those not too busy, that hold most of the blocks, and how many those are.

        None when nobody holds `num_blocks`. Takes one look at each node, and more only at those that hold so many.
        """
        if num_blocks > len(hashes):
            return (), 0
        holders = [node for node in decodes if hashes[num_blocks - 1] in node.prefixes]
        if not holders:
            return (), 0
        most_seqs = min(map(self._counts.num_seqs, decodes)) + MAX_IMBALANCE
        best: list[Node] = []
        for node in holders:
            if self._counts.num_seqs(node) > most_seqs:
                continue
            held = node.prefixes.num_blocks(hashes, num_blocks)
            if held > num_blocks:
                num_blocks, best = held, []
            if held == num_blocks:
                best.append(node)
        return best, num_blocks

    def _with_room(self, role: Role, num_tokens: int) -> list[Node]:
        return [node for node in self._fleet.live(role) if _room(node) >= num_tokens]

    def _nobody(self, prompt_len: int) -> RequestError:
        live = self._fleet.live(Role.DECODE)
        if not live:
            return RequestError(self._fleet.why_none(Role.DECODE), status=503, code="no_node")
        return RequestError(
            f"{maximum_context(max(map(_room, live)))}, prompt and output together; the prompt has {prompt_len} "
            "tokens, which leaves no room for output",
            code="context_length_exceeded",
        )


def _room(node: Node) -> int:
    """Tokens that one sequence may have on a node, prompt and output together."""
    return min(node.limits.context_length, node.limits.max_total_num_tokens)
