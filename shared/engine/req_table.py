"""The live requests of one node, and the one way in which each of them ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from shared import log
from shared.errors import RequestError
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import Finish, ReqKey
from shared.protocol.router_port import RouterPort
from shared.scheduling.req import Req


class Queue(Protocol):
    """A place where the role keeps requests."""

    def remove(self, req: Req) -> None:
        """Forget `req`, which has ended. No-op when it is not here."""
        ...


class ReqTable(Mapping[ReqKey, Req]):
    """Every request of a node from its dispatch until its KV is released; a request that ended may still be in it.

    `queues` are all places where the role keeps requests. `cancel_transfer(key, reason)` ends the transfer of a
    request and returns True; it returns False when no transfer of it is under way. The role calls `release` when a
    transfer that was cancelled so has ended: until then the peer may use the pages.
    """

    def __init__(
        self,
        ledger: KVLedger,
        router_port: RouterPort,
        queues: Sequence[Queue],
        cancel_transfer: Callable[[ReqKey, str], bool],
    ) -> None:
        self._ledger = ledger
        self._router_port = router_port
        self._queues = queues
        self._cancel_transfer = cancel_transfer
        self._reqs: dict[ReqKey, Req] = {}

    def __getitem__(self, key: ReqKey) -> Req:
        return self._reqs[key]

    def __iter__(self) -> Iterator[ReqKey]:
        return iter(self._reqs)

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Req) -> None:
        """Enter a request that this node has accepted."""
        self._reqs[req.key] = req
        log.event("req_began", level=logging.DEBUG, **req.fields, tokens=len(req.ids))

    def fail(self, req: Req, error: RequestError, *, blames: str = "") -> None:
        """Tell the router of `req` why it fails, and end it. No-op when it has ended.

        `blames` is the incarnation of the node with which its transfer failed, if that is the reason.
        """
        if req.finish is None:
            self._router_port.fail(req.key, error.status, error.message, error.param, blames)
            self.end(req.key, error.message)

    def fail_all(self, router: str, reason: str) -> None:
        """Fail every request of `router`."""
        for req in [req for req in self._reqs.values() if req.key.router == router]:
            self.fail(req, RequestError(reason, status=503))

    def end(self, key: ReqKey, reason: str) -> None:
        """End a request in any stage. Its KV is released now, or when its transfer has ended. No-op if unknown."""
        req = self._reqs.get(key)
        if req is None:
            return
        for queue in self._queues:
            queue.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        if not self._cancel_transfer(key, reason):
            self.release(req)

    def release(self, req: Req) -> None:
        """Give back the KV of a request that has ended, and forget it."""
        if req.kv is not None:
            self._ledger.cache_finished_req(req.kv, req.ids, evict_first=req.evict_first)
            req.kv = None
        del self._reqs[req.key]
        log.event(
            "req_ended",
            level=logging.DEBUG,
            **req.fields,
            tokens=len(req.ids),
            finish=req.finish.type if req.finish is not None else None,
        )
