"""Requests whose pages are reserved and whose KV is on its way."""

from __future__ import annotations

from shared.errors import TransferError
from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.layout import record_digest
from shared.kvtransfer.states import Received
from shared.protocol.messages import ReqKey
from shared.scheduling.req import Req


class TransferQueue:
    """Until its transfer has ended, a request's pages belong to the receiver: nobody else writes or frees them."""

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._reqs: dict[ReqKey, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._reqs

    def add(self, req: Req) -> None:
        """`req` has been opened with the receiver."""
        self._reqs[req.key] = req

    def take(self, key: ReqKey) -> Req:
        """The transfer of `key` has ended; its pages are the request's again."""
        return self._reqs.pop(key)


def take_over(req: Req, received: Received, ledger: KVLedger) -> None:
    """Make a received sequence ready to decode: its KV is committed, shared, and its new tokens are known.

    Raises TransferError when the record does not fit the sequence that the router dispatched here.
    """
    handoff = received.handoff
    assert req.kv is not None
    inputs, outputs = req.ids[: req.num_input_ids], req.ids[req.num_input_ids :]
    fits = 0 < len(handoff.token_ids) < req.max_output_len - len(outputs)
    if handoff.kv_len != len(req.ids) or not fits:
        raise TransferError(
            f"handoff of kv_len {handoff.kv_len} and {len(handoff.token_ids)} tokens "
            f"for a sequence of {len(inputs)} + {len(outputs)} tokens"
        )
    if handoff.digest != record_digest(inputs, outputs, handoff.token_ids, handoff.kv_len):
        raise TransferError("handoff digest: the prefill node worked on other tokens")
    req.kv.kv_committed_len = req.kv.kv_allocated_len = handoff.kv_len
    ledger.cache_unfinished_req(req.kv, req.ids)
    ledger.release_superseded(req.kv)
    req.ids += handoff.token_ids
    req.num_sampled = req.output_len
    if req.grammar is not None and not req.grammar.follow(req.ids, req.num_input_ids):
        raise TransferError(f"handoff: the grammar does not allow its tokens {handoff.token_ids}")
    req.cached_tokens = handoff.cached_tokens
    req.timeline.stamps[:0] = handoff.stamps  # should this node report first, nothing is missing
    req.kv_pages_transferred = received.pages
    req.kv_bytes_transferred = received.nbytes
