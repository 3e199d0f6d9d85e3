"""Puts the tokens of one sequence in order: each position is forwarded once, and after those before it."""

from __future__ import annotations

from collections.abc import Sequence


class TokenOrder:
    """Reorders by output position.

    Position 0 comes from the prefill and from the decode node, and tokens of two nodes may overtake each other. The
    first token to arrive for a position is kept. `entry_check` has bounded the positions.
    """

    def __init__(self, first: int) -> None:
        self.next = first
        self.end: int | None = None
        self._ahead: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """True when every token up to the announced end has been forwarded."""
        return self.end is not None and self.next >= self.end

    def finish_at(self, position: int) -> None:
        """No token at or after `position` belongs to the sequence. The first announcement counts."""
        if self.end is None:
            self.end = max(position, self.next)

    def add(self, position: int, token_ids: Sequence[int]) -> list[int]:
        """Take tokens whose first is at `position`; returns those that can be forwarded now."""
        limit = position + len(token_ids) if self.end is None else self.end
        if position == self.next and not self._ahead:
            ready = list(token_ids[: max(0, limit - position)])
            self.next += len(ready)
            return ready
        for at, token_id in enumerate(token_ids, start=position):
            if self.next <= at < limit:
                self._ahead.setdefault(at, token_id)
        ready = []
        while self.next in self._ahead and self.next != self.end:
            ready.append(self._ahead.pop(self.next))
            self.next += 1
        return ready
