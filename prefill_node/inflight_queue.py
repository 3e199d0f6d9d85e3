"""Requests whose pages a decode node may still read: from the first offer until the transfer has ended."""

from __future__ import annotations

from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.layout import record_digest
from shared.kvtransfer.sender import KVSender
from shared.protocol.messages import Handoff, ReqKey
from shared.scheduling.req import Req


class InflightQueue:
    """Knows how much of each request has been offered. Pages named here are not freed (the hold rule)."""

    def __init__(self, ledger: KVLedger, sender: KVSender) -> None:
        self._ledger = ledger
        self._sender = sender
        self._next_page: dict[ReqKey, int] = {}

    def __len__(self) -> int:
        return len(self._next_page)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._next_page

    def add(self, req: Req, prefix_pages: int) -> None:
        """The decode node holds the first `prefix_pages` already; the rest will be offered."""
        self._next_page[req.key] = prefix_pages

    def offer_computed(self, req: Req) -> None:
        """Offer the whole pages that commits have completed since the last offer."""
        assert req.kv is not None
        self._offer_up_to(req, req.kv.kv_committed_len // self._ledger.page_size)

    def hand_off(self, req: Req) -> None:
        """Offer the last, perhaps partly filled page, and send what the decode node needs to go on by itself."""
        assert req.kv is not None
        kv_len = req.kv.kv_committed_len
        total_pages = self._ledger.pages_for(kv_len)
        self._offer_up_to(req, total_pages)
        token_ids = tuple(req.ids[kv_len:])
        outputs = req.ids[req.num_input_ids : kv_len]
        self._sender.handoff(
            req.key,
            Handoff(
                key=req.key,
                total_pages=total_pages,
                token_ids=token_ids,
                kv_len=kv_len,
                digest=record_digest(req.ids[: req.num_input_ids], outputs, token_ids, kv_len),
                cached_tokens=req.cached_tokens,
                stamps=tuple(req.timeline.stamps),
                logprobs=req.last_logprobs,
                input_logprobs=req.input_logprobs,
            ),
        )

    def remove(self, key: ReqKey) -> None:
        """The transfer has ended."""
        self._next_page.pop(key, None)

    def _offer_up_to(self, req: Req, end_page: int) -> None:
        first = self._next_page[req.key]
        if end_page <= first:
            return
        assert req.kv is not None
        self._sender.offer(req.key, self._ledger.rows.read(req.kv.row, first, end_page))
        self._next_page[req.key] = end_page
