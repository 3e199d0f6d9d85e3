"""What the RadixCache holds of each waiting request's prompt."""

from __future__ import annotations

from shared.kvcache.ledger import KVLedger
from shared.kvcache.radix_cache import Peek
from shared.scheduling.req import Req


class CachedPrefixes:
    """Looked up once, until the RadixCache changes; looking is no use of a prefix."""

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._found: dict[tuple[Req, int], Peek] = {}
        self._num_changes = -1
        """How often the RadixCache had changed when `_found` was found."""

    def peek(self, req: Req) -> Peek:
        """The longest cached prefix that `req` could use."""
        if self._num_changes != self._ledger.radix_cache.num_changes:
            self._num_changes = self._ledger.radix_cache.num_changes
            self._found = {}
        ids = req.matchable_ids
        key = req, len(ids)
        peek = self._found.get(key)
        if peek is None:
            peek = self._found[key] = self._ledger.peek_prefix(ids, req.extra_key)
        return peek

    def num_tokens(self, req: Req) -> int:
        """Its length."""
        return self.peek(req).num_pages * self._ledger.page_size
