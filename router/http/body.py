"""Request bodies as typed models: one definition checks a body, bounds it, and is the OpenAPI document.

A model derives from `Body` and is the parameter of a handler, so FastAPI validates it; `wrong_input` writes errors.
`JsonBodies` bounds the bytes of a body. `JsonRoute` decodes it; it is the `route_class` of all routers that take one.
`null` means the default, everywhere. Unknown fields are ignored, since clients of other servers send them. A known
field that cannot be served (`Body.refused`) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import pydantic
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.responses import refuse
from router.http.wording import cut, shown, wrong
from shared.errors import RequestError

BRANCH = "~"
"""The prefix of a union's tags, which tells them from fields in the location of an error."""


class Body(BaseModel):
    """A JSON object of a request. Types are exact: 3.0 is not an integer, and "true" is not a boolean."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}
    """Known fields that cannot be served, and why: an answer that ignored one would look as if it followed it."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, why in cls.refused.items():
            if not _is_nothing(values.get(name)):
                raise PydanticCustomError("refused", "{why}", {"why": why, "field": name})
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Pydantic's schema, in which a field that may be left out may be null too."""
        described = handler(schema)
        whole = handler.resolve_ref_schema(described)
        for name in whole.get("properties", {}).keys() - whole.get("required", ()):
            whole["properties"][name] = {"anyOf": [whole["properties"][name], {"type": "null"}]}
        return described


def _is_nothing(value: object) -> bool:
    """Whether a value asks for nothing. A batch may have one for each prompt."""
    if isinstance(value, list):
        return all(item is None or item is False for item in value)
    return value in (None, False, "", {}) and type(value) is not int


NOT_YET = "not supported yet"


def about(description: str, default: object = ..., **bounds: Any) -> Any:
    """pydantic's Field, with a description for the OpenAPI document."""
    return Field(default, description=description, **bounds)


class FailFast(pydantic.FailFast):
    """Ends the check of a list at its first wrong item. It is hashable, as types in a union must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


class OneOf:
    """Chooses the type of a field by the JSON type of its value: `Annotated[str | list[str], OneOf(phrase, {...})]`.

    Keys of `branches` are "str", "int", "bool", "dict", "list", or "list[str]" and so on, by the first item of a
    list; a list that begins with null counts as one of lists. "dict[text]" is an object whose `type` is text. The
    error says `phrase` when no branch fits.
    """

    def __init__(self, phrase: str, branches: Mapping[str, Any]) -> None:
        self._phrase = phrase
        self._branches = branches
        self._empty_list = next((kind for kind in branches if kind.startswith("list")), "list")

    def __get_pydantic_core_schema__(self, _: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A tagged union, so that errors come from one branch only."""
        return core_schema.tagged_union_schema(
            {BRANCH + kind: handler.generate_schema(branch) for kind, branch in self._branches.items()},
            lambda value: BRANCH + self._kind(value),
            custom_error_type="expected",
            custom_error_message="{phrase}",
            custom_error_context={"phrase": self._phrase},
        )

    def _kind(self, value: Any) -> str:
        if isinstance(value, dict):
            of_its_type = f"dict[{value.get('type')}]"
            return of_its_type if of_its_type in self._branches else "dict"
        if not isinstance(value, list) or "list" in self._branches:
            return type(value).__name__
        if not value:
            return self._empty_list
        return f"list[{'list' if value[0] is None else type(value[0]).__name__}]"


def text_or(phrase: str, item: Any, most: int) -> OneOf:
    """A string, or a list of at most so many items."""
    of_items: Any = list
    return OneOf(phrase, {"str": str, "list": Annotated[of_items[item], FailFast(), Field(max_length=most)]})


def one_or_more(phrase: str, kind: str, item: Any, most: int | None = None) -> OneOf:
    """An `item`, whose JSON type is `kind`, or a list of at most so many of them."""
    bounds = [FailFast()] if most is None else [FailFast(), Field(max_length=most)]
    of_items: Any = list
    branch: Any = Annotated
    return OneOf(phrase, {kind: item, "list": branch[(of_items[item], *bounds)]})


# ---------------------------------------------------------------------------------------------- errors
_SUBJECT = re.compile(r"^\w+ should")
_OBJECT_TYPES = ("model_type", "model_attributes_type", "dict_type")


def wrong_input(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The RequestError of the first of pydantic's errors, whose location begins with "body" or "query"."""
    error = errors[0]
    _, *loc = error["loc"]
    value, context = error["input"], error.get("ctx", {})
    if error["type"] == "refused":
        loc.append(context["field"])
        value = value[context["field"]]
    name = _dotted(loc)
    if not name:
        missing = error["type"] == "missing"
        return RequestError(f"the body must be a JSON object, not {'missing' if missing else shown(value)}")
    match error["type"]:
        case "missing":
            return RequestError(f"{name} is missing", param=name)
        case "refused":
            why = f"{name} is {context['why']}; leave it out (it was {shown(value)})"
            return RequestError(why, param=name)
        case "expected":
            return wrong(name, context["phrase"], value)
        case kind:
            message = error["msg"] if kind not in _OBJECT_TYPES else "must be an object"
            expected = _SUBJECT.sub("must", message.partition(" after validation")[0])
            return RequestError(f"{name} {expected}, not {shown(value)}", param=name)


def _dotted(loc: Iterable[int | str]) -> str:
    name = ""
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith(BRANCH):
            name += f".{cut(step)}" if name else cut(step)
    return name


# ----------------------------------------------------------------------------------- decoding, and its bounds
_MAX_BRACKETS, _MAX_COLONS = 1 << 18, 1 << 19
"""The most opening brackets, and the most colons. A body of tiny lists takes 2 us for each to decode, and one of tiny
fields 1 us, and blocks the event loop for that time. A text with so many of them is longer than any prompt."""


class JsonRequest(Request):
    """Decodes with msgspec, which takes a fifth of the standard library's time for a list of 100,000 token ids."""

    async def json(self) -> Any:
        """The decoded body. Raises HTTPException, which FastAPI passes on."""
        body = await self.body()
        if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
            raise HTTPException(400, f"the body has more than {_MAX_BRACKETS} lists and objects")
        if body.count(b":") > _MAX_COLONS:
            raise HTTPException(400, f"the body has more than {_MAX_COLONS} fields (colons)")
        try:
            return msgspec.json.decode(body)
        except (ValueError, RecursionError) as e:
            raise HTTPException(400, f"the body is not valid JSON: {e}") from e


class JsonRoute(APIRoute):
    """A route whose request is a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with a JsonRequest."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonBodies:
    """Middleware: a body has at most `max_bytes`, is not compressed, and is JSON whatever its content-type is.

    `connection.py` bounds the time of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413 or 415. `receive` raises for a body that turns out too large."""
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        declared = headers.get("content-length", "")
        too_large = f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)"
        if encoding not in ("", "identity"):
            why = f"the body has the content-encoding {shown(encoding)}; send it as it is"
            await refuse(RequestError(why, status=415), scope, receive, send)
            return
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await refuse(RequestError(too_large, status=413), scope, receive, send)
            return
        # curl -d declares a form, and some clients declare nothing.
        others = [item for item in scope["headers"] if item[0] != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, too_large)
            return message

        await self._app(scope, counted, send)
