"""transformers' parser of answers, in which a region that cannot be read ends without a value."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_parsing import ResponseParser


class RegionParser(ResponseParser):
    """Importing transformers takes half a second, so a ReplyReader imports this file when it is made.

    A model may write integers of 5000 digits, 2000 levels or control characters, and a client may send tools whose
    schemas are none. Python and transformers refuse these in several ways when the region ends.
    """

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()
