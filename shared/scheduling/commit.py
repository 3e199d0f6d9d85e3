"""Accounts for a forward that is done: tokens appended, requests finished, prefixes shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import Finish
from shared.scheduling.req import Req
from shared.scheduling.sampled import Sampled
from shared.scheduling.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Committed:
    """What one forward brought. A request is in `computed` if its KV grew, and in `sampled` if it got a token."""

    computed: list[Req] = field(default_factory=list)
    sampled: list[Req] = field(default_factory=list)
    finished: list[Req] = field(default_factory=list)


def commit_result(
    batch: ScheduleBatch, sampled: Sampled, ledger: KVLedger, eos_token_ids: frozenset[int]
) -> Committed:
    """Apply what a forward sampled to its requests.

    Results of requests that were retracted, aborted or finished meanwhile are dropped: under overlap the step
    after an EOS has been launched before anybody has seen the EOS.
    """
    out = Committed()
    tokens = iter(sampled.token_ids)
    for item in batch.items:
        token = next(tokens) if item.position is not None else None
        req = item.req
        if item.is_stale:
            continue
        assert req.kv is not None
        req.kv.kv_committed_len = item.start + item.length
        if batch.is_extend:
            ledger.cache_unfinished_req(req.kv, req.ids)
        out.computed.append(req)
        if token is None:
            continue
        if req.output_len < req.max_output_len:
            assert item.position == req.output_len, (
                f"{req.key}: position {item.position}, {req.output_len} known"
            )
            req.ids.append(token)
            out.sampled.append(req)
        finish = finish_reason(req, eos_token_ids)
        if finish is not None:
            req.end(finish)
            out.finished.append(req)
    return out


def finish_reason(req: Req, eos_token_ids: frozenset[int]) -> Finish | None:
    """Why the request ends with its last token, or None. `min_new_tokens` is kept by the sampler, which masks."""
    if req.output_len:
        last = req.ids[-1]
        if last in req.params.stop_token_ids or (last in eos_token_ids and not req.params.ignore_eos):
            return Finish("stop", last)
    if req.output_len >= req.params.max_new_tokens:
        return Finish("length")
    return None
