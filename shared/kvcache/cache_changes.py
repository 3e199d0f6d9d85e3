"""What the RadixCache gained and lost since somebody last asked, by block hash."""

from __future__ import annotations

from collections.abc import Iterable


class CacheChanges:
    """Collects changes between two steps. A page that came and went in between counts as gone."""

    def __init__(self) -> None:
        self._is_stored: dict[int, bool] = {}

    def stored(self, hashes: Iterable[int]) -> None:
        """These pages can be matched from now on."""
        self._is_stored.update(dict.fromkeys(hashes, True))

    def removed(self, hashes: Iterable[int]) -> None:
        """These pages cannot be matched any more."""
        self._is_stored.update(dict.fromkeys(hashes, False))

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes stored, and hashes removed, since the last call."""
        taken, self._is_stored = self._is_stored, {}
        return (
            tuple(block for block, is_stored in taken.items() if is_stored),
            tuple(block for block, is_stored in taken.items() if not is_stored),
        )
