"""Requests that wait for their decode node to reserve pages: the backpressure of the whole service."""

from __future__ import annotations

from shared.protocol.messages import ReqKey
from shared.scheduling.req import Req


class BootstrapQueue:
    """Requests without any KV. One leaves when its decode node says Ready, or when its transfer has ended."""

    def __init__(self) -> None:
        self._reqs: dict[ReqKey, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._reqs

    def add(self, req: Req) -> None:
        """`req` has been opened with the sender."""
        self._reqs[req.key] = req

    def remove(self, req: Req) -> None:
        """Forget a request that ended."""
        self._reqs.pop(req.key, None)

    def take(self, key: ReqKey) -> Req | None:
        """Remove a request; None when it is not (or no longer) here."""
        return self._reqs.pop(key, None)
