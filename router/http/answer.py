"""What routes answer, as types: each answer is built as one, and described by the same one in /openapi.json."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from shared.protocol.messages import Stamp


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object of an answer. A field that is UNSET is left out; every other one is there."""


class ErrorDetail(Answer, kw_only=True, frozen=True):
    """What is wrong."""

    message: Annotated[str, Meta(description="Names field, value and bound.")]
    type: Annotated[str, Meta(description="The kind of error, such as invalid_request_error.")]
    code: Annotated[str | None, Meta(description="The name of what is wrong, where it has one.")]
    param: Annotated[str | None, Meta(description="The field at fault, where it is one.")]


class ErrorAnswer(Answer, kw_only=True, frozen=True):
    """A refusal or a failure, in either dialect; in a stream, the event before `[DONE]`."""

    error: ErrorDetail


class StampAnswer(Answer, kw_only=True, frozen=True):
    """A stage that a request entered."""

    role: Annotated[str, Meta(description="router, prefill or decode.")]
    stage: str
    time: Annotated[float, Meta(description="Seconds since 1970, by the clock of that machine.")]

    @classmethod
    def of(cls, stamp: Stamp) -> StampAnswer:
        """As the wire has it."""
        return cls(role=stamp.role, stage=stamp.stage, time=stamp.time)


class TimelineFields(Answer, frozen=True):
    """What `return_timeline` adds; streams tell it as it becomes known."""

    timeline: list[StampAnswer] | UnsetType = UNSET
    kv_pages_transferred: int | UnsetType = UNSET
    kv_bytes_transferred: int | UnsetType = UNSET
