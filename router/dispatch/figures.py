"""Figures that nodes tell of themselves. A wrong one must neither fail a request nor decide where requests go."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from shared.protocol.messages import Load, ReqReport

MAX_FIGURE = 1e18

_Told = TypeVar("_Told", Load, ReqReport)


def believed(told: _Told) -> tuple[_Told, dict[str, float]]:
    """What a node has `told`, with 0 for each figure below 0, above MAX_FIGURE or not a number; and those figures."""
    wrong = {
        name: figure
        for name in _names_of_figures(type(told))
        if not 0 <= (figure := getattr(told, name)) <= MAX_FIGURE
    }
    return (msgspec.structs.replace(told, **dict.fromkeys(wrong, 0)) if wrong else told), wrong


@cache
def _names_of_figures(kind: type[Load] | type[ReqReport]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type in (int, float))
