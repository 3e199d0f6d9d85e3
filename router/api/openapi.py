"""The OpenAPI document: FastAPI's own, with the types of events and the routes that need a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, params
from fastapi.openapi.utils import get_openapi

from router.http.api_keys import OPEN_PATHS
from router.http.body import JsonRoute
from router.http.responses import TYPES

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds; with 429 and 503.", "schema": {"type": "integer"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": _ERROR, "headers": _RETRY_AFTER, "description": words}
    for status, words in (
        ("4XX", "The request is wrong, or comes too early; the message names field, value and bound."),
        ("5XX", "500: a node failed the request. 503: nothing can serve this now."),
    )
}
"""The errors that every route may answer."""


def new_routes(
    tag: str,
    *,
    prefix: str = "",
    responses: Mapping[int | str, dict[str, Any]] | None = None,
    dependencies: Sequence[params.Depends] = (),
) -> APIRouter:
    """Routes of bodies in JSON, each of which may answer every error.

    `create_api` takes the routes themselves into its app: FastAPI's `include_router` builds each of them anew, and
    has every request walk through the routers.
    """
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=JsonRoute,
        responses={**ERRORS, **(responses or {})},
        dependencies=dependencies,
    )


def openapi_document(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    """The document for the routes of `app`, whose answers FastAPI does not know (`responses.answers`)."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document["components"]
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for response in operation["responses"].values():
                components["schemas"] |= response.pop(TYPES, {})
            if with_keys:
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    return document
