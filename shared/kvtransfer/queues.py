"""The two queues of requests that a node sends, and how a node takes over a request that it has received."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from shared import log
from shared.errors import TransferError
from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import Received, SendEnded
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Handoff
from shared.scheduling.req import Req


class BootstrapQueue(dict[ReqKey, Req]):
    """Requests whose receiving node has not reserved pages yet (SGLang: PrefillBootstrapQueue).

    None of them has any KV. A request leaves when its receiving node says Ready, or when its transfer has ended.
    """

    def remove(self, req: Req) -> None:
        """Forget a request that ended."""
        self.pop(req.key, None)


@dataclass(eq=False, slots=True)
class _Inflight:
    req: Req
    num_known: int
    next_page: int
    window_from: int
    """Pages from this one on are offered with window pages."""


class InflightQueue:
    """Requests whose pages the receiving node may read, from Ready until the transfer has ended, by transfer.

    SGLang's disagg_prefill_inflight_queue. It knows which pages of each request were offered; those are not freed
    (the hold rule).
    """

    def __init__(self, ledger: KVLedger, sender: KVSender) -> None:
        self._ledger = ledger
        self._sender = sender
        self._inflight: dict[ReqKey, _Inflight] = {}

    def __len__(self) -> int:
        return len(self._inflight)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._inflight

    def add(self, key: ReqKey, req: Req, prefix_pages: int, num_known: int) -> None:
        """Enter a request of which the receiving node has `prefix_pages`, and `num_known` tokens in its Work."""
        window_from = self._ledger.first_window_page(num_known)
        if req.kv is not None:  # it runs, and has given up the window pages before these
            window_from = max(window_from, req.kv.window_from)
        self._inflight[key] = _Inflight(req, num_known, prefix_pages, window_from)

    def offer_computed(self, key: ReqKey) -> None:
        """Offer the whole pages that commits have completed since the last offer."""
        inflight = self._inflight[key]
        assert inflight.req.kv is not None
        self._offer_up_to(key, inflight, inflight.req.kv.kv_committed_len // self._ledger.page_size)

    def hand_off(self, key: ReqKey) -> None:
        """Offer the last, perhaps partly filled page, and send what the receiving node needs to go on by itself."""
        inflight = self._inflight[key]
        req, num_known = inflight.req, inflight.num_known
        assert req.kv is not None
        kv_len = req.kv.kv_committed_len
        total_pages = self._ledger.pages_for(kv_len)
        self._offer_up_to(key, inflight, total_pages)
        token_ids = tuple(req.ids[num_known:])
        outputs = req.ids[req.num_input_ids : num_known]
        self._sender.handoff(
            key,
            Handoff(
                key=key,
                total_pages=total_pages,
                token_ids=token_ids,
                kv_len=kv_len,
                digest=record_digest(req.ids[: req.num_input_ids], outputs, token_ids, kv_len),
                cached_tokens=req.cached_tokens,
                stamps=tuple(req.timeline.stamps),
                logprobs=req.last_logprobs if len(token_ids) == 1 else None,
                input_logprobs=req.input_logprobs if num_known == req.num_input_ids else None,
            ),
        )

    def remove(self, key: ReqKey) -> None:
        """Forget a request whose transfer has ended."""
        self._inflight.pop(key, None)

    def _offer_up_to(self, key: ReqKey, inflight: _Inflight, end_page: int) -> None:
        first, kv = inflight.next_page, inflight.req.kv
        assert kv is not None
        if end_page > first:
            pages = self._ledger.rows.read(kv.row, first, end_page)
            offer(self._sender, self._ledger, key, pages, max(inflight.window_from - first, 0))
            inflight.next_page = end_page


def offer(
    sender: KVSender, ledger: KVLedger, key: ReqKey, pages: Sequence[int], num_without_windows: int
) -> None:
    """Offer the next pages of a sequence, of which the first few come without window pages."""
    if ledger.windows is None:
        sender.offer(key, pages)
        return
    sender.offer(key, pages[:num_without_windows])
    sender.offer(key, pages[num_without_windows:], ledger.window_pages_of(pages[num_without_windows:]))


def record_digest(
    input_ids: Sequence[int], output_ids: Sequence[int], token_ids: Sequence[int], kv_len: int
) -> int:
    """64 bits over what prefill and decode must both believe about a sequence when it changes hands."""
    digest = xxhash.xxh3_64()
    for ids in (input_ids, output_ids, token_ids, (kv_len,)):
        digest.update(array("q", (len(ids), *ids)).tobytes())
    return digest.intdigest()


def evict_corrupt(req: Req, ended: SendEnded, ledger: KVLedger) -> None:
    """Evict what was sent of `req`, whose KV is given back already: its pages did not match their digests.

    The pages may be wrong in this node's memory. What is computed again is right.
    """
    num_pages = ledger.evict_behind(req.ids, ended.prefix_pages, req.extra_key)
    log.warn("corrupt_pages_evicted", **req.fields, pages=num_pages)


def take_over(req: Req, received: Received, ledger: KVLedger) -> None:
    """Make a received sequence ready to decode: its KV is committed, shared, and its new tokens are known.

    The KV may be of more tokens than the router dispatched here: the request ran on while its pages moved. Raises
    TransferError when the record does not fit the sequence.
    """
    handoff = received.handoff
    assert req.kv is not None
    inputs, outputs = req.ids[: req.num_input_ids], req.ids[req.num_input_ids :]
    fits = 0 < len(handoff.token_ids) < req.max_output_len - len(outputs)
    if not (len(req.ids) <= handoff.kv_len < len(req.ids) + len(handoff.token_ids)) or not fits:
        raise TransferError(
            f"handoff of kv_len {handoff.kv_len} and {len(handoff.token_ids)} tokens "
            f"for a sequence of {len(inputs)} + {len(outputs)} tokens"
        )
    if handoff.digest != record_digest(inputs, outputs, handoff.token_ids, handoff.kv_len):
        raise TransferError("handoff digest: the sending node worked on other tokens")
    req.ids += handoff.token_ids
    ledger.arrived(req.kv, handoff.kv_len)
    ledger.cache_unfinished_req(req.kv, req.ids)
    ledger.release_superseded(req.kv)
    req.num_sampled = req.output_len
    if req.grammar is not None and not req.grammar.follow(req.ids, req.num_input_ids):
        raise TransferError(f"handoff: the grammar does not allow its tokens {handoff.token_ids}")
    req.cached_tokens = handoff.cached_tokens
    req.timeline.stamps[:0] = handoff.stamps  # a report of this node has them, also when it is the first
    req.kv_pages_transferred = received.pages
    req.kv_bytes_transferred = received.nbytes
