"""The OpenAPI document: each route with what it takes, from the request models, and answers, from the answers' types.

Nothing here describes a field by hand. Tests hold real answers against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import UNSET
from pydantic.json_schema import models_json_schema

from router.http.answer import Answer, ErrorAnswer
from router.http.body import Body

Json = dict[str, Any]

_PLACE = "#/components/schemas/"
_STATUS_WORDS = {
    200: "The answer.",
    400: "Something in the request is wrong; the message names field, value and bound.",
    401: "The key is missing or wrong.",
    403: "The key is not one of an administrator.",
    404: "There is no such thing.",
    408: "The body was too slow, or nothing came in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full.",
    500: "A node failed the request.",
    503: "Nothing can serve this now.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_EVENT_STREAM = (
    "Server-sent events; the schema is that of one event. The last one's data is [DONE]; a failure in mid-stream is "
    "an ErrorAnswer before it."
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What OpenAPI says of one route and method beyond its address and docstring.

    `answer` is a type of answers, or a string: the media type of one that is not JSON; None, where there are only
    events. `event` is what a stream has instead. `errors` are the statuses of an ErrorAnswer; `also` has the other
    ones that are no errors in shape.
    """

    tag: str
    answer: Any
    example: object = None
    event: Any = None
    body: type[Body] | None = None
    body_required: bool = True
    query: Mapping[str, Json] = field(default_factory=dict)
    errors: Sequence[int] = ()
    also: Mapping[int, Any] = field(default_factory=dict)
    needs_key: bool = True


def openapi_document(
    app: FastAPI, operations: Mapping[tuple[str, str], Operation], *, with_keys: bool
) -> Json:
    """The document for the routes of `app`, each of which is in `operations` by (METHOD, path)."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    writer = _Writer(list(operations.values()), with_keys=with_keys)
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            methods[method] = writer.operation(described, operations[method.upper(), path])
    document["components"] = writer.components()
    return document


class _Writer:
    """Refers to schemas, and has them all in the end."""

    def __init__(self, operations: Sequence[Operation], *, with_keys: bool) -> None:
        self._with_keys = with_keys
        bodies = list({operation.body for operation in operations if operation.body is not None})
        bodies.sort(key=lambda body: body.__name__)
        places, defined = models_json_schema(
            [(body, "validation") for body in bodies], ref_template=_PLACE + "{model}"
        )
        self._bodies = {body: places[body, "validation"] for body in bodies}
        self._schemas: Json = dict(defined["$defs"])
        answers = [ErrorAnswer]
        for operation in operations:
            answers += [
                a for a in (operation.answer, operation.event, *operation.also.values()) if _is_json(a)
            ]
        schemas, components = msgspec.json.schema_components(answers, ref_template=_PLACE + "{name}")
        self._answers = list(zip(answers, schemas, strict=True))
        clash = self._schemas.keys() & components.keys()
        assert not clash, f"a body and an answer are both called {clash}"
        self._schemas |= components
        for kind in _structs(Answer):
            if kind.__name__ in components:
                components[kind.__name__]["required"] = _always_there(kind)

    def operation(self, generated: Json, operation: Operation) -> Json:
        """What FastAPI knows (words, id, parameters in the path) with the rest."""
        summary, _, description = generated.get("description", "").partition("\n")
        described: Json = {
            "tags": [operation.tag],
            "summary": summary,
            "operationId": generated["operationId"],
            "responses": self._responses(operation),
        }
        if description.strip():
            described["description"] = description.strip()
        in_path = [p for p in generated.get("parameters", ()) if p["in"] == "path"]
        in_query = [{"name": name, "in": "query", **about} for name, about in operation.query.items()]
        if in_path or in_query:
            described["parameters"] = in_path + in_query
        if operation.body is not None:
            described["requestBody"] = {
                "required": operation.body_required,
                "content": {"application/json": {"schema": self._bodies[operation.body]}},
            }
        if self._with_keys:
            described["security"] = [{"key": []}] if operation.needs_key else []
        return described

    def components(self) -> Json:
        """Every schema that is referred to, and how keys are sent."""
        components: Json = {"schemas": dict(sorted(self._schemas.items()))}
        if self._with_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return components

    def _responses(self, operation: Operation) -> Json:
        content: Json
        if isinstance(operation.answer, str):
            content = {operation.answer: {"schema": {"type": "string"}}}
        elif operation.answer is None:
            content = {}
        else:
            content = {"application/json": {"schema": self._schema(operation.answer)}}
            if operation.example is not None:
                content["application/json"]["example"] = operation.example
        if operation.event is not None:
            content["text/event-stream"] = {"schema": self._event(operation.event)}
        responses: Json = {"200": {"description": _STATUS_WORDS[200], "content": content}}
        keys = (401, 403) if self._with_keys and operation.needs_key else ()
        others = dict.fromkeys((*operation.errors, *keys), ErrorAnswer) | dict(operation.also)
        for status, answer in sorted(others.items()):
            responses[str(status)] = {
                "description": _STATUS_WORDS[status],
                "content": {"application/json": {"schema": self._schema(answer)}},
            }
            if status in (429, 503):
                responses[str(status)]["headers"] = _RETRY_AFTER
        return responses

    def _event(self, answer: Any) -> Json:
        told = {"anyOf": [self._schema(answer), self._schema(ErrorAnswer)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
        return {
            "type": "object",
            "description": _EVENT_STREAM,
            "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            "required": ["data"],
        }

    def _schema(self, answer: Any) -> Json:
        return next(schema for known, schema in self._answers if known is answer or known == answer)


def _is_json(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, str)


def _structs(kind: type[Answer]) -> Iterable[type[Answer]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _structs(sub)


def _always_there(kind: type[Answer]) -> list[str]:
    """A field with a default is sent all the same; only UNSET is left out."""
    config = kind.__struct_config__
    tag = [config.tag_field] if config.tag is not None and config.tag_field else []
    fields = msgspec.structs.fields(kind)
    return tag + [f.encode_name for f in fields if f.default is not UNSET]
