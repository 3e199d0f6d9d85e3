"""Reads a JSON body field by field; whatever is wrong is a RequestError that names field, value and bound.

`null` means the default, everywhere. Unknown fields are tolerated, since clients of other servers send them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence

import msgspec

from shared.errors import RequestError

_SHOWN_CHARS = 60
_short = reprlib.Repr()  # looks at no more of a value than it shows
_short.maxstring = _SHOWN_CHARS


def parse_object(body: bytes) -> Fields:
    """The fields of a JSON object."""
    try:
        decoded = msgspec.json.decode(body)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}") from e
    if not isinstance(decoded, dict):
        raise RequestError(f"the body must be a JSON object, not {shown(decoded)}")
    return Fields(decoded)


def shown(value: object) -> str:
    """A value as it is quoted in an error message: short, and never a whole prompt."""
    text = "null" if value is None else _short.repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class Fields:
    """One JSON object of a request; `path` is where it lies in the body, for messages."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path

    def name(self, field: str) -> str:
        """`field` as the client would name it, from the top of the body."""
        return f"{self._path}.{field}" if self._path else field

    def raw(self, field: str) -> object:
        """The value as decoded; None when it is absent or null."""
        return self._values.get(field)

    def wrong(self, field: str, expected: str) -> RequestError:
        """The error for a value that is not what it should be."""
        name = self.name(field)
        return RequestError(f"{name} must be {expected}, not {shown(self.raw(field))}", param=name)

    def integer(self, field: str, default: int, *, low: int, high: int) -> int:
        """An int within bounds; 3.0 is not one, and neither is true."""
        found = self.optional_integer(field, low=low, high=high)
        return default if found is None else found

    def optional_integer(self, field: str, *, low: int, high: int) -> int | None:
        """An int within bounds, or None."""
        value = self.raw(field)
        if value is None:
            return None
        if type(value) is not int:
            raise self.wrong(field, "an integer")
        if not low <= value <= high:
            raise self.wrong(field, f"at least {low}" if value < low else f"at most {high}")
        return value

    def number(
        self, field: str, default: float, *, low: float, high: float = math.inf, above_low: bool = False
    ) -> float:
        """A finite number in [low, high], or in (low, high] with `above_low`."""
        value = self.raw(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.wrong(field, "a number")
        assert isinstance(value, int | float)
        if value < low or (above_low and value == low):
            raise self.wrong(field, f"{'above' if above_low else 'at least'} {low:g}")
        if value > high or not abs(value) <= 1e300:
            raise self.wrong(field, f"at most {high:g}" if high < math.inf else "a finite number")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        """True or false, nothing that merely looks like it."""
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def string(self, field: str, *, max_chars: int) -> str | None:
        """A string of bounded length, or None."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        if len(value) > max_chars:
            raise self.wrong(field, f"at most {max_chars} characters long")
        return value

    def strings(self, field: str, *, max_count: int, max_chars: int) -> tuple[str, ...]:
        """A string, or a list of strings; none of them empty."""
        value = self.raw(field)
        if value is None:
            return ()
        found = [s for s in (value if isinstance(value, list) else [value]) if isinstance(s, str)]
        if not isinstance(value, str) and (not isinstance(value, list) or len(found) < len(value)):
            raise self.wrong(field, "a string or a list of strings")
        if len(found) > max_count:
            raise self.wrong(field, f"a list of at most {max_count}")
        if not all(0 < len(s) <= max_chars for s in found):
            raise self.wrong(field, f"made of strings of 1 to {max_chars} characters")
        return tuple(found)

    def integers(self, field: str, *, low: int, high: int, max_count: int) -> tuple[int, ...]:
        """A list of ints, each within bounds."""
        value = self.raw(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise self.wrong(field, "a list of integers")
        if len(value) > max_count:
            raise self.wrong(field, f"a list of at most {max_count}")
        outside = next((i for i in value if not low <= i <= high), None)
        if outside is not None:
            name = self.name(field)
            raise RequestError(
                f"{name} must hold integers from {low} to {high}, not {shown(outside)}", param=name
            )
        return tuple(value)

    def nested(self, field: str) -> Fields:
        """A nested object; an empty one when it is absent."""
        value = self.raw(field)
        if value is None:
            return Fields({}, self.name(field))
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Fields(value, self.name(field))

    def refuse(self, defaults: Mapping[str, Sequence[object]], why: str) -> None:
        """Refuse the fields named in `defaults` when they ask for anything but one of those values.

        A feature that is not there must not be ignored in silence: its user would believe in the answer.
        """
        for field, harmless in defaults.items():
            value = self.raw(field)
            if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                name = self.name(field)
                raise RequestError(f"{name} is {why}; leave it out (it was {shown(value)})", param=name)
