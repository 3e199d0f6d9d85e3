"""Tells routers which prefixes this node caches, so that they can send requests that begin with them here."""

from __future__ import annotations

from shared.kvcache.ledger import KVLedger
from shared.kvcache.radix_cache import CacheChanges
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
        """Send the prefixes that this step added and removed to every router that has had the whole list."""
        assert self._cache.changes is not None
        stored, removed = self._cache.changes.take()
        if stored or removed:
            self._seq += 1
            self._router_port.tell_all(CacheEvents(self._seq, stored, removed))

    def tell_all(self, router: str) -> None:
        """Send all hashes to a router that is new or has missed a change; `tell_changes` includes it from now on."""
        self.tell_changes()  # else the router would get these changes twice
        self._router_port.tell(router, CacheEvents(self._seq, tuple(self._cache.hashes()), (), reset=True))
