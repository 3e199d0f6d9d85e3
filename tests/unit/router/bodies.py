"""Bodies as handlers get them: validated as FastAPI does, and worded as the router does."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from router.http.body import Body, wrong_input

B = TypeVar("B", bound=Body)


def validate(kind: type[B], values: object) -> B:
    """Decoded JSON as a `kind`. Raises RequestError."""
    try:
        return kind.model_validate(values, from_attributes=True)
    except ValidationError as e:
        raise wrong_input([{**error, "loc": ("body", *error["loc"])} for error in e.errors()]) from e
