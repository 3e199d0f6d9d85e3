"""Accounts for a forward that is done: tokens are appended and jumped over, requests finish, prefixes are shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import RequestError
from shared.kvcache.ledger import KVLedger
from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import Finish
from shared.scheduling.grammar_queue import grammar_error
from shared.scheduling.plan import KVCopy, ScheduleBatch, ScheduledReq
from shared.scheduling.req import Req


@dataclass(slots=True)
class Outcome:
    """What one turn of the `Launcher` brought: of the forward that was due, and of the copies ahead of it."""

    computed: list[Req] = field(default_factory=list)
    """Requests whose KV has grown."""
    sampled: list[Req] = field(default_factory=list)
    """Requests that got a token, and with it perhaps tokens that they jumped over."""
    finished: list[Req] = field(default_factory=list)
    failed: dict[Req, RequestError] = field(default_factory=dict)
    """Requests that cannot go on: their forward or copy failed, or their grammar allows no token or is too slow."""
    copied: list[tuple[KVCopy, float]] = field(default_factory=list)
    """Copies of KV that have landed before this forward, and the seconds each took."""
    prefilled: tuple[int, float] | None = None
    """Tokens of the forward and the seconds that it took, if it computed tokens of a prompt."""
    worked: bool = False
    """True unless no forward was launched and none was due."""


def commit_result(
    batch: ScheduleBatch, sampled: Sampled, ledger: KVLedger, eos_token_ids: frozenset[int], outcome: Outcome
) -> None:
    """Apply what a forward sampled to its requests, and add to `outcome` what became of them.

    Results of requests that were retracted, aborted or finished meanwhile are dropped: under overlap the step
    after an EOS has been launched before the EOS was seen.
    """
    tokens = iter(enumerate(sampled.token_ids))
    for b, item in enumerate(batch.items):
        entry, token = next(tokens) if item.position is not None else (-1, None)
        req = item.req
        if item.is_stale:
            continue
        assert req.kv is not None
        req.kv.kv_committed_len = item.start + item.length
        if b < len(batch.extends):
            ledger.cache_unfinished_req(req.kv, req.ids)
        ledger.slide(req.kv)
        outcome.computed.append(req)
        _keep_input_logprobs(item, sampled.input_logprobs.get(b))
        if token is None:
            continue
        if req.output_len < req.max_output_len:
            assert item.position == req.output_len, (
                f"{req.key}: position {item.position}, {req.output_len} known"
            )
            if req.grammar is not None and not req.grammar.accept(token):
                outcome.failed[req] = grammar_error(req)
                continue
            req.ids.append(token)
            req.num_jumped = 0
            req.last_logprobs = sampled.logprobs.get(entry)
            outcome.sampled.append(req)
        finish = finish_reason(req, eos_token_ids)
        if finish is None:
            jump_forward(req, eos_token_ids)
            finish = finish_reason(req, eos_token_ids)
        if finish is not None:
            req.end(finish)
            outcome.finished.append(req)


def _keep_input_logprobs(item: ScheduledReq, more: Logprobs | None) -> None:
    """Join the prompt logprobs of this chunk to those before it. A prefill that starts again drops those."""
    req = item.req
    if req.output_len:
        req.input_logprobs = None  # told with position 0
    elif more is not None:
        assert req.input_logprobs_from is not None
        before = req.input_logprobs if item.start > req.input_logprobs_from else None
        req.input_logprobs = before.followed_by(more) if before is not None else more


def finish_reason(req: Req, eos_token_ids: frozenset[int]) -> Finish | None:
    """Why the request ends with its last token, or None. `min_new_tokens` is kept by the sampler, which masks."""
    if req.output_len:
        last = req.ids[-1]
        if req.grammar is not None and req.grammar.is_terminated:
            return Finish("stop", last)  # also with ignore_eos: nothing may follow
        if last in req.params.stop_token_ids or (last in eos_token_ids and not req.params.ignore_eos):
            return Finish("stop", last)
    if req.output_len >= req.params.max_new_tokens:
        return Finish("length")
    return None


MIN_TOKENS = 3
"""A shorter jump is not worth it: with overlap the step in flight is lost, so that k tokens save k - 1 forwards."""


def jump_forward(req: Req, eos_token_ids: frozenset[int]) -> None:
    """Append what the grammar of `req` forces after its newest token, which was just committed and does not end it.

    As in SGLang (Zheng et al. 2024, "Efficient Execution of Structured Language Model Programs"), but the
    sampled token stays as it is: only tokens that come after it are appended. Results in flight are dropped. The
    next step of the request computes the KV of the appended tokens and of the one before them, as one extend.

    Whether a request jumps, and how far, follows from its output tokens and its parameters alone, and is decided
    once for each sampled token, when it is committed. So overlap, retraction and moving to another node change
    nothing. One TokenEntry has the sampled token and those jumped over after it, so that no router has a part.
    """
    tokens = _tokens_to_jump(req, eos_token_ids)
    if len(tokens) < MIN_TOKENS:
        return
    assert req.grammar is not None and req.kv is not None
    for token in tokens:
        if not req.grammar.accept(token):
            break  # the tokenizer does not spell the text as the grammar reads it
        req.ids.append(token)
        req.num_jumped += 1
    if req.num_jumped:
        req.drop_results_in_flight()
        req.kv.kv_allocated_len = req.kv.kv_committed_len


def _tokens_to_jump(req: Req, eos_token_ids: frozenset[int]) -> list[int]:
    params = req.params
    if req.grammar is None or params.logprobs is not None or params.logit_bias:
        return []  # logprobs come with sampling; a bias may prefer another spelling
    tokens = req.grammar.forced_tokens()[: params.max_new_tokens - req.output_len]
    ends = {*eos_token_ids, *params.stop_token_ids}
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each sequence that sampled, in the order of the batch.

    `logprobs` are by the index of the token, where they were asked for. `input_logprobs`, of prompt tokens that the
    forward computed, are by the index of the sequence in the batch.
    """

    token_ids: list[int]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)
