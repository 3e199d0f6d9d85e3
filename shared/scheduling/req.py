"""One request on one node."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from shared.errors import RequestError
from shared.grammar.state import GrammarState
from shared.kvcache.ledger import ReqKV
from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import Decode, Finish, NodeLimits, Prefill, ReqKey, ReqReport, Work
from shared.protocol.sampling_params import SamplingParams
from shared.timeline import Clock, ReqStage, Role, Timeline


@dataclass(eq=False, slots=True)
class Req:
    """A sequence that this node prefills, decodes, or both.

    `work` is what the router asked for; `ids` are prompt and known output in one list. Where the request *is* follows
    from the queue it sits in; how far it is follows from lengths:

        len(ids)                 tokens known on the host
        kv.kv_allocated_len      tokens whose KV is computed, or being computed by a launched forward
        num_sampled              output tokens asked of the device, known or still in flight
    """

    key: ReqKey
    work: Work
    timeline: Timeline
    max_output_len: int
    """The request leaves this node's batches when it has so many output tokens."""
    ids: list[int] = field(init=False)
    num_input_ids: int = field(init=False)
    num_sampled: int = field(init=False)
    kv: ReqKV | None = None
    generation: int = 0
    """Raised whenever results in flight become worthless: by retraction, jump, abort and finish."""
    finish: Finish | None = None
    arrival_step: int | None = None
    """Forwards that this node had decided on when the request arrived; None until its Batcher has heard of it."""
    arrival_number: int = 0
    """How many requests the Batcher had heard of by then, this one included."""
    grammar: GrammarState | None = None
    """Set when `params.grammar` has been compiled here; follows the tokens known on the host."""
    num_jumped: int = 0
    """How many of the last tokens were not sampled but jumped over, behind the one that was: see `jump_forward`."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the RadixCache. What was computed ahead for this request is not."""
    ahead_from: int | None = None
    """How many tokens were cached when its prompt began to be computed ahead of its reservation; None: it was not."""
    ahead_s: float = 0.0
    """How long its prompt was computed ahead, while it was QUEUED."""
    num_retractions: int = 0
    host_pages: list[int] = field(default_factory=list)
    """Where its KV is in host memory: while it is retracted, and until the copy back has landed."""
    stalled_since: int = 0
    stalled_output_len: int = -1
    """The forward since which it gets no further, and its output length then: see `retraction`."""
    evict_first: bool = False
    """Whether another node keeps its KV, so that what it adds to the RadixCache is evicted before the rest."""
    kv_pages_transferred: int = 0
    kv_bytes_transferred: int = 0
    fetch_s: float = 0.0
    num_fetched_tokens: int = 0
    """What it waited for pages that another node lent, and for how many tokens they came."""
    extend_len: int = field(default=0)
    """Tokens that the next extend computes."""
    last_logprobs: Logprobs | None = None
    """Of the last token, where they are asked for."""
    input_logprobs: Logprobs | None = None
    """Of the prompt tokens computed so far, where they are asked for; told with output position 0, then forgotten."""

    def __post_init__(self) -> None:
        self.ids = [*self.work.input_ids, *self.work.output_ids]
        self.num_input_ids = len(self.work.input_ids)
        self.num_sampled = len(self.work.output_ids)

    @property
    def fields(self) -> dict[str, Any]:
        """The client's name of the request and its key, as every log event about it has them."""
        return {"rid": self.work.rid, **self.key.fields}

    @property
    def params(self) -> SamplingParams:
        """How to sample, and when to stop."""
        return self.work.params

    @property
    def extra_key(self) -> str:
        """The namespace of the RadixCache in which its prefix is matched and stored."""
        return self.work.extra_key

    @property
    def output_len(self) -> int:
        """Output tokens known on the host."""
        return len(self.ids) - self.num_input_ids

    @property
    def newest_ids(self) -> tuple[int, ...]:
        """The token that was sampled last, and those jumped over behind it."""
        return tuple(self.ids[-1 - self.num_jumped :])

    @property
    def input_logprobs_from(self) -> int | None:
        """The first prompt position whose logprob is wanted and not told yet; None when there is none.

        They are told with output position 0, so a request that resumes after it wants none.
        """
        wanted = self.params.logprobs
        if wanted is None or wanted.start_len < 0 or self.output_len:
            return None
        return wanted.start_len

    @property
    def matchable_ids(self) -> list[int]:
        """The ids whose KV may come from a cache: a prompt position whose logprob is wanted has to be computed.

        Like `ids`, they are one longer than what may match.
        """
        wanted_from = self.input_logprobs_from
        return self.ids if wanted_from is None else self.ids[: wanted_from + 1]

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is computed or launched."""
        return self.kv.kv_allocated_len if self.kv else 0

    @property
    def is_in_flight(self) -> bool:
        """True while a launched forward or copy will still add to its KV or its tokens."""
        kv = self.kv
        return kv is not None and (
            kv.kv_committed_len < kv.kv_allocated_len or self.num_sampled > self.output_len
        )

    @property
    def wants_decode(self) -> bool:
        """True while a decode step would ask for a token that is wanted."""
        return self.finish is None and self.num_sampled < self.max_output_len

    @property
    def is_resumed(self) -> bool:
        """True for a request that ran before, here or elsewhere. It goes before new ones of its level."""
        return bool(self.num_retractions or self.key.attempt)

    @property
    def num_wanted(self) -> int:
        """Output tokens still to be asked for."""
        return self.max_output_len - self.num_sampled

    def report(self) -> ReqReport:
        """What the router is told with the first token and with the finish."""
        return ReqReport(
            cached_tokens=self.cached_tokens,
            stamps=tuple(self.timeline.stamps),
            kv_pages_transferred=self.kv_pages_transferred,
            kv_bytes_transferred=self.kv_bytes_transferred,
            num_retractions=self.num_retractions,
            ahead_s=self.ahead_s,
            fetch_s=self.fetch_s,
            num_fetched_tokens=self.num_fetched_tokens,
        )

    def drop_results_in_flight(self) -> None:
        """Forget what launched forwards will still deliver."""
        self.generation += 1
        self.num_sampled = self.output_len

    def end(self, finish: Finish) -> None:
        """End the request on this node."""
        self.finish = finish
        self.generation += 1
        if self.timeline.stage is not ReqStage.FINISHED:
            self.timeline.move_to(ReqStage.FINISHED)


def accept(
    message: Prefill | Decode, limits: NodeLimits, vocab_size: int, stamp_clock: Clock = time.time
) -> Req:
    """The request that a router's message describes. Raises RequestError when it can never be served here.

    A prefill node samples one token of it, a decode node all that are wanted. `stamp_clock` times its stages.
    """
    is_prefill = isinstance(message, Prefill)
    work = message.work
    wanted = work.params.max_new_tokens
    max_output_len = min(wanted, len(work.output_ids) + 1) if is_prefill else wanted
    check_request(work, max_output_len, limits, vocab_size)
    timeline = Timeline(Role.PREFILL if is_prefill else Role.DECODE, clock=stamp_clock)
    return Req(message.key, work, timeline, max_output_len, evict_first=message.evict_first)


def check_request(work: Work, max_output_len: int, limits: NodeLimits, vocab_size: int) -> None:
    """Raise RequestError when the sequence can never be served here: then no retraction could make room for it.

    Only `max_output_len` output tokens will be computed on this node. Routers have checked what does not depend on a
    node: the ranges of sampling parameters.
    """
    input_ids, output_ids = work.input_ids, work.output_ids
    if not input_ids:
        raise RequestError("input_ids: the prompt is empty", param="input_ids")
    worst = next((i for i in (*input_ids, *output_ids) if not 0 <= i < vocab_size), None)
    if worst is not None:
        raise RequestError(
            f"input_ids: token id {worst} is not between 0 and {vocab_size - 1}", param="input_ids"
        )
    most = min(limits.context_length, limits.max_total_num_tokens)
    total = len(input_ids) + max(max_output_len, len(output_ids))
    if total > most:
        raise RequestError(
            f"the prompt of {len(input_ids)} tokens and {max_output_len} of output make {total}; "
            f"context_length {limits.context_length} and max_total_num_tokens {limits.max_total_num_tokens} "
            f"leave room for {most}",
            param="max_new_tokens",
        )
