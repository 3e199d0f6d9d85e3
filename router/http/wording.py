"""How errors quote a client's values. This is not in `body`, so that the flags need no pydantic."""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec

from shared.errors import RequestError

_SHOWN_CHARS = 60


class _JsonNames(reprlib.Repr):
    """Writes values as JSON does, and reads no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = _SHOWN_CHARS

    def repr1(self, x: Any, level: int) -> str:
        """A part of a value; None, booleans and tuples as in JSON."""
        if x is None or isinstance(x, bool):
            return msgspec.json.encode(x).decode()
        return super().repr1(list(x) if isinstance(x, tuple) else x, level)


_short = _JsonNames()


def wrong(name: str, expected: str, value: object) -> RequestError:
    """The error for a field with a wrong value."""
    return RequestError(f"{name} must be {expected}, not {shown(value)}", param=name)


def shown(value: object) -> str:
    """A value, shortened for an error message, which never has a whole prompt."""
    return cut(_short.repr(value))


def cut(text: str) -> str:
    """The text, or its beginning if it is too long for a message."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
