"""What the router knows of a request on each node, and how long its stages will take there.

Times come from rates that nodes measure of themselves. What a node has not measured is taken from the others: the
median of all nodes. Estimates decide between nodes, so a factor that is common to all of them does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import median

from router.dispatch.node_counts import NodeCounts
from router.dispatch.running_req import Node
from shared.protocol.block_hash import BlockHashes
from shared.protocol.messages import Load, NodeRef, Role, Work

PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_TRANSFER_BYTES_PER_S = 1e9
PRIOR_DECODE_TOKENS_PER_S = 1_000.0
"""Believed while no node has measured the rate."""

STALL_WEIGHT = 0.5
"""A second for which a running stream pauses counts for so many seconds of waiting for a first token."""


MAX_TOKENS_PER_S = 1e7
"""No hardware is faster. A node that says it is must not get every prompt, however many wait there."""

TOKENS_AHEAD = 64
"""A sequence makes each step of its neighbours longer. So many of their steps count as its costs."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """When the first token of a request is expected, by measured rates. The wait for pages is not in it."""

    wait_s: float
    """For the prompts that wait on the node that computes it."""
    compute_s: float
    """For what no cache holds of its prompt."""


class RequestEstimates:
    """One request as it would fare on the nodes of `fleet`, which has all live nodes. Times are seconds."""

    def __init__(self, work: Work, fleet: Sequence[Node], counts: NodeCounts) -> None:
        self.num_tokens = len(work.input_ids) + len(work.output_ids)
        """Tokens of the sequence that are known."""
        self._work = work
        self._fleet = fleet
        self._counts = counts
        self._num_cached_pages: dict[NodeRef, int] = {}
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

    def num_missing_tokens(self, node: Node) -> int:
        """Tokens of the sequence whose KV `node` does not hold."""
        return self.num_tokens - self.num_cached_pages(node) * node.page_size

    def num_seqs(self, node: Node) -> int:
        """The number of sequences on `node`. Those of other routers are as of its latest Pong."""
        return self._counts.seqs.of(node)

    def load(self, node: Node) -> int:
        """Tokens that wait for their prefill on a prefill node; sequences on a decode node."""
        return self._counts.queued_tokens.of(node) if node.role is Role.PREFILL else self.num_seqs(node)

    # -------------------------------------------------------------------------------- how long it takes
    def prefill_s(self, node: Node) -> float:
        """Until `node` has computed what it does not hold, behind the prompts that wait there."""
        num_tokens = self._counts.queued_tokens.of(node) + self.num_missing_tokens(node)
        return num_tokens / self._rate(node, prefill_rate, PRIOR_PREFILL_TOKENS_PER_S)

    def transfer_s(self, node: Node) -> float:
        """To move to `node` what it does not hold."""
        nbytes = self.num_missing_tokens(node) * node.kv_nbytes_per_token
        return nbytes / self._rate(node, transfer_rate, PRIOR_TRANSFER_BYTES_PER_S)

    def local_prefill_s(self, node: Node) -> float:
        """As `prefill_s` on a decode node, with the pauses of the sequences there, of which there is at least one."""
        return self.prefill_s(node) * (1 + STALL_WEIGHT * max(self.num_seqs(node), 1))

    def place_s(self, node: Node) -> float:
        """What a place on a decode node costs: its neighbours there, and the wait for pages that are not free."""
        neighbours_s = TOKENS_AHEAD * self.num_seqs(node) / self._decode_tokens_per_s
        num_pages = self._counts.used_pages.of(node) + ceil(self.num_missing_tokens(node) / node.page_size)
        return (
            neighbours_s if num_pages <= node.load.num_pages else 2 * neighbours_s + node.load.reserve_wait_s
        )

    def first_token(self, node: Node) -> FirstToken | None:
        """When the prompt is computed, if `node` does it. None while no node has measured how fast it prefills."""
        rate = self._measured(node, prefill_rate)
        if not rate:
            return None
        return FirstToken(self._counts.queued_tokens.of(node) / rate, self.num_missing_tokens(node) / rate)

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


def prefill_rate(load: Load) -> float:
    """Prompt tokens a second; 0 if the node has not measured it."""
    return min(load.prefill_tokens_per_s, MAX_TOKENS_PER_S)


def transfer_rate(load: Load) -> float:
    """Bytes of KV a second; 0 if the node has not measured it."""
    return load.kv_bytes_transferred / load.kv_transfer_s if load.kv_transfer_s > 0 else 0.0


def _matchable_ids(work: Work) -> tuple[int, ...]:
    """The tokens whose KV may come from a cache: all but the last, which is computed for the next token.

    Prompt tokens whose logprobs are wanted are computed, until those have come with output position 0.
    """
    ids = work.input_ids + work.output_ids
    if work.params.logprobs is None or work.output_ids:
        return ids[:-1]
    return ids[: work.params.logprobs.num_matchable(len(ids))]
