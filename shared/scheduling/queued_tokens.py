"""How many prompt tokens a node has still to compute."""

from __future__ import annotations

from collections.abc import Iterable

from shared.kvcache.ledger import KVLedger
from shared.scheduling.req import Req


class QueuedTokens:
    """Prompt tokens of this node's requests whose KV is not there yet, from their arrival on.

    What the RadixCache holds of a prompt is looked up when the request is added.
    """

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._ends: dict[Req, tuple[int, int]] = {}
        """The length of each prompt that is not computed, and how many of its tokens are counted."""
        self.total = 0

    def add(self, req: Req) -> None:
        """Count a request whose prompt is to be computed here, or count it anew as the RadixCache is now."""
        self.remove(req)
        cached = self._ledger.peek_prefix(req.matchable_ids, req.extra_key).num_pages * self._ledger.page_size
        self._ends[req] = len(req.ids), len(req.ids) - cached
        self.total += len(req.ids) - cached

    def computed(self, reqs: Iterable[Req]) -> None:
        """Take note that the KV of these requests has grown."""
        for req in reqs:
            if req in self._ends and req.kv is not None:
                end, counted = self._ends[req]
                left = min(counted, end - req.kv.kv_committed_len)
                self.total -= counted - left
                self._ends[req] = end, left
                if left <= 0:
                    self.remove(req)

    def remove(self, req: Req) -> None:
        """Forget a request that ended."""
        _, counted = self._ends.pop(req, (0, 0))
        self.total -= counted
