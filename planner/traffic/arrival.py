"""One request as a line of a trace tells it, and what its fields may be."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec

MAX_TOKENS = 10_000_000
"""Of one prompt or answer. A larger number is a wrong field rather than a long prompt."""

Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e16)]


class BadLine(ValueError):
    """A line is not of its format. The message names the field, what it is, and what it may be."""


class Arrival(NamedTuple):
    """One request as a line tells it. `blocks` name the first blocks of its prompt."""

    at_s: float
    input_len: int
    output_len: int
    blocks: Sequence[Hashable] = ()


ParseLine = Callable[[bytes], Iterable[Arrival]]
"""Raises BadLine or msgspec.MsgspecError."""


def is_number(text: str) -> bool:
    """Whether it is a whole number of no more digits than MAX_TOKENS has."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS))


def whole_number(name: str, text: str) -> int:
    """The tokens that field `name` says. Raises BadLine."""
    if is_number(text) and int(text) <= MAX_TOKENS:
        return int(text)
    raise BadLine(f"{name} is {text[:40]!r}, and must be a whole number from 0 to {MAX_TOKENS}")
