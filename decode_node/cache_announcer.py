"""Tells routers which prefixes this node holds, so that a follow-up can come here and bring only what is new."""

from __future__ import annotations

from shared.kvcache.cache_changes import CacheChanges
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import CacheEvents
from shared.protocol.router_port import RouterPort


class CacheAnnouncer:
    """Numbers the changes of the RadixCache. A router that misses a number asks for everything."""

    def __init__(self, ledger: KVLedger, router_port: RouterPort) -> None:
        self._cache = ledger.radix_cache
        self._cache.changes = CacheChanges()
        self._router_port = router_port
        self._seq = 0

    def tell_changes(self) -> None:
        """Send what came and went in this step to every router that has been told all before."""
        assert self._cache.changes is not None
        stored, removed = self._cache.changes.take()
        if stored or removed:
            self._seq += 1
            self._router_port.tell_all(CacheEvents(self._seq, stored, removed))

    def tell_all(self, router: str) -> None:
        """Send all hashes to a router that is new or has missed a change; `tell_changes` includes it from now on."""
        self.tell_changes()  # else the router would be told these twice
        self._router_port.tell(router, CacheEvents(self._seq, tuple(self._cache.hashes()), (), reset=True))

    def close(self) -> None:
        """Have the RadixCache note its changes no longer; a scheduler without an announcer would never take them."""
        self._cache.changes = None
