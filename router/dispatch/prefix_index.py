"""The prefixes that one node caches, by its cache events."""

from __future__ import annotations

from collections.abc import Sequence

from shared.protocol.messages import CacheEvents

ASK_AGAIN_AFTER_EVENTS = 64
"""Events that are ignored while a reset is awaited, before it is asked for again, since it may have been lost."""
ASK_AFTER_PONGS = 2
MAX_PONGS_BEFORE_ASKING = 64
"""Pongs in a row that announce more events than have come, before a reset is asked for. The number doubles each time
that no reset comes, since a node in a long step answers pings, but not this."""


class PrefixIndex:
    """The block hashes of one node's RadixCache. The index is empty while events are missing.

    A prefix may be evicted before a request arrives, so the node checks the prefix for which it was chosen.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._seq: int | None = None
        self._num_ignored = 0
        self._num_pongs_behind = 0
        self._patience = ASK_AFTER_PONGS

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def apply(self, events: CacheEvents) -> bool:
        """Apply events in the order of their arrival. False if some are missing: the caller asks for a reset."""
        if events.reset:
            self._blocks = set(events.stored)
            self._applied(events.seq)
            return True
        if self._seq is None:  # a reset has been asked for
            self._num_ignored += 1
            return self._num_ignored % ASK_AGAIN_AFTER_EVENTS != 0
        if events.seq != self._seq + 1:
            self._forget()
            return False
        self._blocks.difference_update(events.removed)
        self._blocks.update(events.stored)
        self._applied(events.seq)
        return True

    def compare(self, seq: int | None) -> bool:
        """Compare with the last `seq` that the node's Pong announces. False as in `apply`.

        This finds lost events that no others follow.
        """
        if seq is None or (self._seq is not None and self._seq >= seq):
            self._num_pongs_behind = 0
            return True
        self._num_pongs_behind += 1
        if self._num_pongs_behind < self._patience:
            return True
        self._forget()
        self._patience = min(2 * self._patience, MAX_PONGS_BEFORE_ASKING)
        return False

    def num_blocks(self, hashes: Sequence[int], at_least: int = 0) -> int:
        """How many blocks from the start of a sequence the node holds; 0 if they are fewer than `at_least`.

        A node that holds a block holds those before it, so the first `at_least` blocks are one lookup.
        """
        if at_least and hashes[at_least - 1] not in self._blocks:
            return 0
        for at in range(at_least, len(hashes)):
            if hashes[at] not in self._blocks:
                return at
        return len(hashes)

    def _applied(self, seq: int) -> None:
        self._seq = seq
        self._num_ignored = self._num_pongs_behind = 0
        self._patience = ASK_AFTER_PONGS

    def _forget(self) -> None:
        self._blocks.clear()
        self._seq = None
        self._num_ignored = self._num_pongs_behind = 0
