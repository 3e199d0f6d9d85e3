"""Block hashes of the pages that entered and left the RadixCache since the last report."""

from __future__ import annotations

from collections.abc import Iterable


class CacheChanges:
    """Collects changes between two reports. A page that entered and left in between counts as removed."""

    def __init__(self) -> None:
        self._is_stored: dict[int, bool] = {}

    def stored(self, hashes: Iterable[int]) -> None:
        """Note pages that can be matched from now on."""
        self._is_stored.update(dict.fromkeys(hashes, True))

    def removed(self, hashes: Iterable[int]) -> None:
        """Note pages that can no longer be matched."""
        self._is_stored.update(dict.fromkeys(hashes, False))

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (stored hashes, removed hashes) since the last call."""
        taken, self._is_stored = self._is_stored, {}
        return (
            tuple(block for block, is_stored in taken.items() if is_stored),
            tuple(block for block, is_stored in taken.items() if not is_stored),
        )
