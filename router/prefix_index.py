"""Which prefixes one node holds, as its cache events tell."""

from __future__ import annotations

from collections.abc import Sequence

from shared.protocol.messages import CacheEvents


class PrefixIndex:
    """The block hashes of one node's RadixCache. Empty while events are missing, until the node has sent them all.

    What it says may be out of date by the time a request arrives: a node checks what it was promised.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._seq: int | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: CacheEvents) -> bool:
        """Take in events in the order of their arrival. False: some are missing, so ask the node for all."""
        if events.reset:
            self._blocks = set(events.stored)
            self._seq = events.seq
            return True
        if self._seq is None:
            return True  # all has been asked for and is on its way
        if events.seq != self._seq + 1:
            self._blocks.clear()
            self._seq = None
            return False
        self._blocks.difference_update(events.removed)
        self._blocks.update(events.stored)
        self._seq = events.seq
        return True

    def num_blocks(self, hashes: Sequence[int]) -> int:
        """How many blocks from the start of a sequence the node holds."""
        for at, block in enumerate(hashes):
            if block not in self._blocks:
                return at
        return len(hashes)
