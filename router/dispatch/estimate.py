"""What the router knows of a request on each node, and how long its stages will take there.

Times come from rates that nodes measure of themselves. What a node has not measured is taken from the others: the
median of all nodes. Estimates decide between nodes, so a factor that is common to all of them does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from math import ceil
from random import Random
from statistics import median

from router.dispatch.fleet_view import FleetView
from router.dispatch.node import Node
from shared.protocol.block_hash import BlockHashes
from shared.protocol.messages import Lend, Load, NodeRef, Role, Work
from shared.timeline import PRIOR_PREFILL_TOKENS_PER_S, PRIOR_TRANSFER_BYTES_PER_S

PRIOR_DECODE_TOKENS_PER_S = 1_000.0
"""Believed while no node has measured the rate."""

ALWAYS_LOCAL_TOKENS = 16
"""A prompt of so many tokens takes one short forward anywhere: no transfer is worth it."""


MAX_TOKENS_PER_S = 1e7
"""No hardware is faster. A node that says it is must not get every prompt, however many wait there."""

FETCH_S = 0.02
"""How long two nodes take to agree on a fetch, besides its bytes: a few turns of each."""

MAX_LENDERS = 4
MAX_NARROWED = 64
"""Of so many nodes it is counted how many pages of a sequence they hold, and so many of them are looked at."""

PAUSE_COSTS = 0.5
"""A second for which a stream pauses counts as so many of waiting for a first token: its reader has text to read."""

TOKENS_AHEAD = 64
"""A sequence makes each step of its neighbours longer. So many of their steps count as its costs."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a node would have to compute of a sequence if `lender` lends it what it holds, after `seconds`."""

    lender: Node
    num_pages: int
    """Held by the lender, from the start of the sequence on."""
    num_left_tokens: int
    seconds: float
    is_linked: bool
    """Whether pages can go from the lender to the node at once. Else a link has to be built before."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """When the first token of a request is expected, by measured rates. The wait for pages is not in it."""

    wait_s: float
    """For the prompts that wait on the node that computes it, and meanwhile for what it fetches."""
    compute_s: float
    """For what comes from no cache of its prompt."""


class RequestEstimates:
    """One request as it would fare on each node of the `view`. Times are seconds.

    A decode node computes by itself what has at most `local_prefill_tokens`; None: what it computes sooner than a
    prefill node would, if it holds the beginning.
    """

    def __init__(
        self, work: Work, view: FleetView, random: Random, local_prefill_tokens: int | None = None
    ) -> None:
        self.random = random
        """For policies that draw."""
        self.elsewhere_s: float | None = None
        """For a choice of decode nodes: how long another node takes to compute the prompt. None: no other can."""
        self._local_prefill_tokens = local_prefill_tokens
        self.num_tokens = len(work.input_ids) + len(work.output_ids)
        """Tokens of the sequence that are known."""
        self._work = work
        self._fleet = view.nodes
        self._view = view
        self._num_cached_pages: dict[NodeRef, int] = {}
        self._fetches: dict[NodeRef, Fetch | None] = {}
        self._usual: dict[Callable[[Load], float], float] = {}

    # ----------------------------------------------------------------------------------- what is there
    @cached_property
    def page_hashes(self) -> Sequence[int]:
        """The block hashes of the pages whose KV could come from a cache. Each is computed when it is first read."""
        return BlockHashes(_matchable_ids(self._work), self._fleet[0].page_size, self._work.extra_key)

    def num_cached_pages(self, node: Node, at_least: int = 0) -> int:
        """Pages of the sequence that `node` holds; 0 if they are fewer than `at_least`, which is one lookup."""
        known = self._num_cached_pages.get(node.ref)
        if known is None:
            known = node.prefixes.num_blocks(self.page_hashes, at_least) if len(node.prefixes) else 0
            if known or not at_least:
                self._num_cached_pages[node.ref] = known
        return known

    def narrowed(self, num_pages: int, holders: Sequence[Node], at_most: int) -> Sequence[Node]:
        """Of nodes that hold `num_pages` pages, those that hold most, by halving; more than `at_most` if they tie."""
        hashes, end = self.page_hashes, len(self.page_hashes) + 1
        while len(holders) > at_most and end - num_pages > 1:
            middle = min(2 * num_pages, (num_pages + end) // 2)
            last = hashes[middle - 1]
            if deeper := [node for node in holders if last in node.prefixes]:
                num_pages, holders = middle, deeper
            else:
                end = middle
        return holders

    def num_missing_tokens(self, node: Node) -> int:
        """Tokens of the sequence whose KV `node` does not hold."""
        return self.num_tokens - self.num_cached_pages(node) * node.page_size

    def num_seqs(self, node: Node) -> int:
        """The number of sequences on `node`. Those of other routers are as of its latest Pong."""
        return self._view.seqs.of(node)

    def has_pages(self, node: Node) -> bool:
        """Whether `node` has a place for what it does not hold of the sequence."""
        num_pages = ceil(self.num_missing_tokens(node) / node.page_size)
        return self._view.used_pages.of(node) + num_pages <= node.load.num_pages

    def last_chosen(self, role: Role) -> str:
        """The node_id of the node of a role that was sent the request before."""
        return self._view.last[role]

    def load(self, node: Node) -> int:
        """Tokens that wait for their prefill on a prefill node; sequences on a decode node."""
        return self._view.queued_tokens.of(node) if node.role is Role.PREFILL else self.num_seqs(node)

    # -------------------------------------------------------------------------------- how long it takes
    def prefill_s(self, node: Node) -> float:
        """Until `node` has computed what it neither holds nor fetches, behind the prompts that wait there."""
        first = self._first_token(node, self._rate(node, prefill_rate, PRIOR_PREFILL_TOKENS_PER_S))
        return first.wait_s + first.compute_s

    def fetch(self, node: Node) -> Fetch | None:
        """The fetch by which a prefill node is ready sooner than by computing; None if there is no such fetch."""
        if node.ref not in self._fetches:
            self._fetches[node.ref] = self._best_fetch(node) if node.role is Role.PREFILL else None
        return self._fetches[node.ref]

    def transfer_s(self, node: Node) -> float:
        """To move to `node` what it does not hold."""
        nbytes = self.num_missing_tokens(node) * node.kv_nbytes_per_token
        return nbytes / self._rate(node, transfer_rate, PRIOR_TRANSFER_BYTES_PER_S)

    def local_prefill_s(self, node: Node) -> float:
        """As `prefill_s` on a decode node, with the pauses of the sequences there, of which there is at least one."""
        return self.prefill_s(node) * (1 + PAUSE_COSTS * max(self.num_seqs(node), 1))

    def local_limit(self, node: Node) -> int | None:
        """Most tokens of the prompt that a decode node computes by itself; None: a prefill node, in `elsewhere_s`."""
        assert self.elsewhere_s is not None
        num_missing, most = self.num_missing_tokens(node), self._local_prefill_tokens
        if most is not None:
            return most if num_missing <= most else None
        if num_missing <= ALWAYS_LOCAL_TOKENS:
            return ALWAYS_LOCAL_TOKENS
        elsewhere_s = max(self.elsewhere_s, self.transfer_s(node))
        if self.num_cached_pages(node) and self.local_prefill_s(node) < elsewhere_s:
            return 2 * num_missing  # it may have evicted a little meanwhile
        return None

    def place_s(self, node: Node) -> float:
        """What a place on a decode node costs: its neighbours there, and the wait for pages that are not free."""
        neighbours_s = TOKENS_AHEAD * self.num_seqs(node) / self._decode_tokens_per_s
        return neighbours_s if self.has_pages(node) else 2 * neighbours_s + node.load.reserve_wait_s

    def first_token(self, node: Node) -> FirstToken | None:
        """When the prompt is computed, if `node` does it. None while no node has measured how fast it prefills."""
        rate = self._measured(node, prefill_rate)
        if not rate:
            return None
        return self._first_token(node, rate)

    def _first_token(self, node: Node, rate: float) -> FirstToken:
        wait_s = self._view.queued_tokens.of(node) / rate
        fetch = self.fetch(node)
        if fetch is None or not fetch.is_linked:
            return FirstToken(wait_s, self.num_missing_tokens(node) / rate)
        return FirstToken(max(wait_s, fetch.seconds), fetch.num_left_tokens / rate)

    def _best_fetch(self, node: Node) -> Fetch | None:
        held = self.num_cached_pages(node)
        lenders = [
            lender
            for lender in self._lenders
            if lender is not node
            and lender.numerics == node.numerics
            and min(lender.version, node.version) >= Lend.since_version
            and self.num_cached_pages(lender) > held
        ]
        if not lenders:
            return None
        lender = next((one for one in lenders if is_linked(one, node)), lenders[0])
        num_pages = self.num_cached_pages(lender)
        nbytes = (num_pages - held) * node.page_size * node.kv_nbytes_per_token
        seconds = FETCH_S + nbytes / self._rate(lender, transfer_rate, PRIOR_TRANSFER_BYTES_PER_S)
        rate = self._rate(node, prefill_rate, PRIOR_PREFILL_TOKENS_PER_S)
        wait_s = self._view.queued_tokens.of(node) / rate
        num_left = self.num_tokens - num_pages * node.page_size
        if max(wait_s, seconds) + num_left / rate >= wait_s + self.num_missing_tokens(node) / rate:
            return None
        return Fetch(lender, num_pages, num_left, seconds, is_linked(lender, node))

    @cached_property
    def _lenders(self) -> Sequence[Node]:
        """The nodes that hold most of the sequence, the first more than the others."""
        if not len(self.page_hashes):
            return ()
        holders = [node for node in self._fleet if self.page_hashes[0] in node.prefixes]
        most = self.narrowed(1, holders, MAX_NARROWED)[:MAX_NARROWED]
        return nlargest(
            MAX_LENDERS, most, key=lambda node: (self.num_cached_pages(node), -self.num_seqs(node))
        )

    @cached_property
    def _decode_tokens_per_s(self) -> float:
        """Of the node with the largest batch, where the share of one sequence in the costs of a step shows best."""
        most = max(node.load.gen_throughput for node in self._fleet)
        return min(most, MAX_TOKENS_PER_S) or PRIOR_DECODE_TOKENS_PER_S

    def _rate(self, node: Node, rate: Callable[[Load], float], prior: float) -> float:
        return self._measured(node, rate) or prior

    def _measured(self, node: Node, rate: Callable[[Load], float]) -> float:
        """The rate of `node`, or the usual one of other nodes; 0 if no node has measured it."""
        own = rate(node.load)
        if own > 0:
            return own
        if rate not in self._usual:
            known = [other for other in (rate(node.load) for node in self._fleet) if other > 0]
            self._usual[rate] = median(known) if known else 0.0
        return self._usual[rate]


def is_linked(lender: Node, borrower: Node) -> bool:
    """Whether `lender` has told that a link to `borrower` is ready."""
    to = borrower.ref.incarnation
    return any(link.peer == to and not link.incoming for link in lender.load.links)


def prefill_rate(load: Load) -> float:
    """Prompt tokens a second; 0 if the node has not measured it."""
    return min(load.prefill_tokens_per_s, MAX_TOKENS_PER_S)


def transfer_rate(load: Load) -> float:
    """Bytes of KV a second; 0 if the node has not measured it."""
    return load.kv_bytes_per_s


def _matchable_ids(work: Work) -> tuple[int, ...]:
    """The tokens whose KV may come from a cache: all but the last, which is computed for the next token.

    Prompt tokens whose logprobs are wanted are computed, until those have come with output position 0.
    """
    ids = work.input_ids + work.output_ids
    if work.params.logprobs is None or work.output_ids:
        return ids[:-1]
    return ids[: work.params.logprobs.num_matchable(len(ids))]
