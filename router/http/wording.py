"""How errors quote a client's values. This is not in `body`, so that the flags need no pydantic."""

from __future__ import annotations

import reprlib
from typing import Any

from shared.errors import RequestError

_SHOWN_CHARS = 60


class _JsonNames(reprlib.Repr):
    """Writes values as JSON does, and reads no more of a value than it shows."""

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x), level)

    def repr_NoneType(self, _: None, __: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, x: bool, _: int) -> str:
        return "true" if x else "false"


_short = _JsonNames()
_short.maxstring = _SHOWN_CHARS


def wrong(name: str, expected: str, value: object) -> RequestError:
    """The error for a field with a wrong value."""
    return RequestError(f"{name} must be {expected}, not {shown(value)}", param=name)


def shown(value: object) -> str:
    """A value, shortened for an error message, which never has a whole prompt."""
    return cut(_short.repr(value))


def cut(text: str) -> str:
    """The text, or its beginning if it is too long for a message."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
