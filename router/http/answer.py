"""The base type of answers, which msgspec encodes and describes for /openapi.json."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object of an answer. A field that is UNSET is left out.

    A pydantic model would cost a stream more per event than the event itself.
    """
