"""Running requests that leave this node for another decode node.

    opened       the target has not said Ready; the request runs
    in flight    it runs on, and its whole pages are offered as steps commit them
    stopped      it takes no further step; when nothing of it is in flight, the last page and the handoff are sent
    (ended)      Done: the target has all of it. Otherwise the request runs on here, also when it was stopped

A request is stopped when all that was offered before the last commit is on its way, or when the target has no place
for another step. Until its transfer has ended it keeps its row, its pages and its lock on the tree,
and it is held: it is not retracted, since the transfer reads its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared import log
from shared.kvcache.ledger import KVLedger
from shared.kvtransfer.peering import MAX_UNNAMED_PEERS, Peering
from shared.kvtransfer.queues import InflightQueue
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import SendEnded
from shared.protocol.messages import Move, ReqKey
from shared.protocol.router_port import RouterPort
from shared.protocol.transfer_messages import Ready
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import ReqStage


@dataclass(eq=False, slots=True)
class _Moving:
    req: Req
    target: str
    """Its incarnation."""
    num_pages: int = 0
    """The target has a place for so many pages of the sequence."""
    num_known: int = 0
    """Tokens of the sequence that the target has in its Work."""
    is_handed_off: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether the request takes no further step here."""
        return self.req.timeline.stage is ReqStage.TRANSFERRING


class Moves:
    """The moves that leave this node, by the key of the move."""

    def __init__(
        self, ledger: KVLedger, sender: KVSender, peering: Peering, batcher: Batcher, router_port: RouterPort
    ) -> None:
        self._ledger = ledger
        self._sender = sender
        self._peering = peering
        self._batcher = batcher
        self._router_port = router_port
        self._inflight_queue = InflightQueue(ledger, sender)
        self._moves: dict[ReqKey, _Moving] = {}
        self._keys: dict[Req, ReqKey] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def __contains__(self, req: Req) -> bool:
        """Whether `req` is on its way, so that a transfer may read its pages."""
        return req in self._keys

    def is_stopped(self, req: Req) -> bool:
        """Whether `req` is on its way and takes no further step here."""
        key = self._keys.get(req)
        return key is not None and self._moves[key].is_stopped

    def start(self, message: Move, req: Req | None) -> None:
        """Begin to move `req`, or tell its router why it stays."""
        refusal = self._refusal(message, req)
        if refusal is not None:
            self._router_port.fail(message.to_key, 503, refusal)
            return
        assert req is not None
        target = message.target.incarnation
        self._moves[message.to_key] = _Moving(req, target)
        self._keys[req] = message.to_key
        self._batcher.hold(req)
        self._peering.ensure(message.target)
        self._sender.open(message.to_key, target)
        log.event("move", **req.fields, to_key=message.to_key, target=target, output_len=req.output_len)

    def ready(self, ready: Ready) -> None:
        """The target has reserved pages: offer what is computed."""
        moving = self._moves.get(ready.key)
        if moving is None or moving.req.finish is not None or ready.key in self._inflight_queue:
            return
        req, num_known = moving.req, ready.num_known
        fits = num_known is not None and req.num_input_ids <= num_known <= len(req.ids)
        if not fits or not 0 <= ready.prefix_pages <= self._ledger.pages_for(num_known or 0):
            self.cancel(
                ready.key, f"the target claims {ready.prefix_pages} pages and {num_known} tokens of it"
            )
            return
        assert num_known is not None
        moving.num_pages, moving.num_known = ready.num_pages, num_known
        assert req.kv is not None
        req.kv.keeps_windows = True
        self._inflight_queue.add(ready.key, req, ready.prefix_pages, num_known)
        if self._fits(moving, req.kv_len):
            self._inflight_queue.offer_computed(ready.key)

    def advance(self) -> None:
        """Offer what the last step has committed; stop requests whose time has come, and hand off stopped ones."""
        for key, moving in self._moves.items():
            if key not in self._inflight_queue or moving.req.finish is not None or moving.is_handed_off:
                continue
            if not moving.is_stopped:
                self._offer_or_stop(key, moving)
            if moving.is_stopped and not moving.req.is_in_flight:
                moving.is_handed_off = True
                self._inflight_queue.hand_off(key)

    def cancel(self, to_key: ReqKey, reason: str) -> None:
        """Give a move up, if it is one; `ended` follows, and its request runs on."""
        if to_key in self._moves:
            self._sender.cancel(to_key, reason)

    def cancel_of(self, key: ReqKey, reason: str) -> bool:
        """Give up the move of the request `key`, which has ended or whose pages are needed; False if it has none."""
        to_key = next((to_key for req, to_key in self._keys.items() if req.key == key), None)
        if to_key is not None:
            self._sender.cancel(to_key, reason)
        return to_key is not None

    def ended(self, ended: SendEnded) -> Req:
        """Forget a move, whose pages are not read any more. Returns its request, which runs on if it has not left."""
        moving = self._moves.pop(ended.key)
        req = moving.req
        del self._keys[req]
        self._inflight_queue.remove(ended.key)
        self._batcher.let_go(req)
        if not (ended.ok or ended.handed_off or ended.corrupt):  # else the target tells the router
            self._router_port.fail(ended.key, 503, ended.reason)
        log.event("move_ended", **req.fields, to_key=ended.key, ok=ended.ok, reason=ended.reason)
        if req.finish is None and not ended.ok:
            assert req.kv is not None
            req.kv.keeps_windows = False
            self._ledger.release_superseded(req.kv)
            if moving.is_stopped:
                req.timeline.move_to(ReqStage.DECODING)
                self._batcher.admit_prefilled(req)
        return req

    # ------------------------------------------------------------------------------------------ inside
    def _refusal(self, message: Move, req: Req | None) -> str | None:
        if req is None or req.timeline.stage is not ReqStage.DECODING:
            return f"{message.key} does not run on this node"
        if req in self._keys:
            return f"{message.key} is on its way to another node"
        targets = {moving.target for moving in self._moves.values()}
        if message.target.incarnation not in targets and len(targets) >= MAX_UNNAMED_PEERS:
            return f"this node moves requests to {len(targets)} nodes already"
        return None

    def _offer_or_stop(self, key: ReqKey, moving: _Moving) -> None:
        req = moving.req
        num_sent, num_offered = self._sender.num_pages_sent(key)
        if not self._fits(moving, req.kv_len):
            self.cancel(key, "the request has outgrown the pages that its target has reserved")
            return
        self._inflight_queue.offer_computed(key)
        is_full = not self._fits(moving, max(req.kv_len + 1, len(req.ids)))
        if is_full and num_sent == 0 < num_offered:
            self.cancel(key, "no page has left before the pages that its target has reserved were full")
            return
        may_stop = (is_full or num_sent == num_offered) and req.kv_len >= moving.num_known
        if may_stop and self._batcher.suspend(req):
            req.timeline.move_to(ReqStage.TRANSFERRING)

    def _fits(self, moving: _Moving, kv_len: int) -> bool:
        """Whether the target has a place for `kv_len` tokens of the request."""
        return self._ledger.pages_for(kv_len) <= moving.num_pages
