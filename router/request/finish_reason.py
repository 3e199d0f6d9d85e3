"""Why a sequence has ended, in the native API's types."""

from __future__ import annotations

from typing import Annotated, Literal

from router.http.answer import Answer
from router.http.body import about


class StopReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="stop"):
    """The sequence ended at the model's own end token, or at a stop string or id of the request."""

    matched: Annotated[int | str | None, about("The token id or the string; null at a grammar's end.")]


class LengthReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="length"):
    """The sequence reached `max_new_tokens`, or the context or the KV pool is full."""

    length: Annotated[int, about("Output tokens.")]


class AbortReason(Answer, kw_only=True, frozen=True, tag_field="type", tag="abort"):
    """The sequence was ended by /abort_request."""

    message: str
    status_code: int


FinishReason = StopReason | LengthReason | AbortReason


def kind_of(reason: FinishReason) -> Literal["stop", "length", "abort"]:
    """The `type` of `reason`."""
    match reason:
        case StopReason():
            return "stop"
        case LengthReason():
            return "length"
        case AbortReason():
            return "abort"
