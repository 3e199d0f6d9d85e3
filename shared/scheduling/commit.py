"""Accounts for a forward that is done: tokens appended, requests finished, prefixes shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import RequestError
from shared.kvcache.ledger import KVLedger
from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import Finish
from shared.scheduling.grammar_queue import stuck
from shared.scheduling.jump_forward import jump_forward
from shared.scheduling.req import Req
from shared.scheduling.sampled import Sampled
from shared.scheduling.schedule_batch import KVCopy, ScheduleBatch, ScheduledReq


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
        outcome.computed.append(req)
        _keep_input_logprobs(item, sampled.input_logprobs.get(b))
        if token is None:
            continue
        if req.output_len < req.max_output_len:
            assert item.position == req.output_len, (
                f"{req.key}: position {item.position}, {req.output_len} known"
            )
            if req.grammar is not None and not req.grammar.accept(token):
                outcome.failed[req] = stuck(req)
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
    """Join those of the chunks of a prompt; a prefill that starts again starts them again."""
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
