"""Accounts for a forward that is done: tokens appended, requests finished, prefixes shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.kvcache.ledger import KVLedger
from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import Finish
from shared.scheduling.jump_forward import jump_forward
from shared.scheduling.req import Req
from shared.scheduling.retraction import KVCopy
from shared.scheduling.sampled import Sampled
from shared.scheduling.schedule_batch import ScheduleBatch, ScheduledReq


@dataclass(slots=True)
class Committed:
    """What one forward brought. A request is in `computed` if its KV grew, and in `sampled` if it got a token."""

    computed: list[Req] = field(default_factory=list)
    sampled: list[Req] = field(default_factory=list)
    finished: list[Req] = field(default_factory=list)
    stuck: list[Req] = field(default_factory=list)
    """Their grammar allows no token that this model has, or is too slow; what was sampled is dropped."""
    copied: list[tuple[KVCopy, float]] = field(default_factory=list)
    """Copies of KV that have landed before this forward, and the seconds each took."""


def commit_result(
    batch: ScheduleBatch, sampled: Sampled, ledger: KVLedger, eos_token_ids: frozenset[int]
) -> Committed:
    """Apply what a forward sampled to its requests.

    Results of requests that were retracted, aborted or finished meanwhile are dropped: under overlap the step
    after an EOS has been launched before anybody has seen the EOS.
    """
    out = Committed()
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
        out.computed.append(req)
        _keep_input_logprobs(item, sampled.input_logprobs.get(b))
        if token is None:
            continue
        if req.output_len < req.max_output_len:
            assert item.position == req.output_len, (
                f"{req.key}: position {item.position}, {req.output_len} known"
            )
            if req.grammar is not None and not (req.grammar.accept(token) and not req.grammar.is_too_slow):
                out.stuck.append(req)
                continue
            req.ids.append(token)
            req.num_jumped = 0
            req.last_logprobs = sampled.logprobs.get(entry)
            out.sampled.append(req)
        finish = finish_reason(req, eos_token_ids)
        if finish is None:
            jump_forward(req, eos_token_ids)
            finish = finish_reason(req, eos_token_ids)
        if finish is not None:
            req.end(finish)
            out.finished.append(req)
    return out


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
