"""The ASGI application: middleware, routes, and one JSON shape for every error.

    RequestIds          gives every answer its id
    RequestLog          logs the answers of all others (--log-requests)
    Traces.around       sends the traces of sequences (--otlp-traces-endpoint)
    CORSMiddleware      answers preflights, which have no key, and adds its headers to refusals (--allowed-origins)
    ApiKeyCheck         refuses a request without a key, before its body is read
    JsonBodies          refuses a body that is too large
    HeadAsGet           answers HEAD wherever GET is answered
    FastAPI             routes, and errors as JSON, also those of bugs

All are plain ASGI, since starlette's BaseHTTPMiddleware would keep a client's disconnect from a stream. Each
scope is that of an HTTP request: the server has no websockets and no lifespan.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from router.api.fleet_api import fleet_admin_routes, fleet_guards
from router.api.generate_api import generate_routes
from router.api.live_state import LiveState, live_routes
from router.api.messages_api import messages_routes
from router.api.openai_api import openai_routes
from router.api.openapi import openapi_document
from router.api.prefix_hashes import PrefixHasher
from router.api.request_log import RequestLog
from router.api.responses_api import responses_routes
from router.api.service_api import control_routes, health_routes, info_routes
from router.config import HttpOptions
from router.dispatch.metrics import Metrics
from router.http.api_keys import ApiKeyCheck, ApiKeys, admin_guard
from router.http.body import JsonBodies, wrong_input
from router.http.page_api import serve_page
from router.http.responses import HEADER, HeadAsGet, RequestIds, error_response, note_error
from router.nodes.fleet_answers import RequestsAborted
from router.nodes.fleet_changes import FleetChanges
from router.nodes.membership import Membership
from router.nodes.status import VERSION, FleetStatus
from router.request.admission import Admissions
from router.request.generation import Desk, Generator
from router.text.served_model import ModelSlot
from shared.errors import RequestError
from shared.log import crash

if TYPE_CHECKING:
    from router.api.traces import Traces

_Handler = Callable[[Request, Exception], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """The parts that routes are built from."""

    model: ModelSlot
    membership: Membership
    changes: FleetChanges
    admissions: Admissions
    generator: Generator
    abort: Callable[[str | None], RequestsAborted]
    """Aborts the requests of a rid, or all (None), at all routers. Returns the number of sequences of this one."""
    metrics: Metrics
    status: FleetStatus
    live: LiveState
    http: HttpOptions
    keys: ApiKeys
    traces: Traces | None
    log_hasher: PrefixHasher
    flags: Mapping[str, object]


def create_app(service: Service) -> ASGIApp:
    """The routes behind their middleware."""
    app: ASGIApp = JsonBodies(HeadAsGet(create_api(service)), service.http.limits.max_body_bytes)
    app = ApiKeyCheck(app, service.keys)
    if service.http.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.http.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "retry-after"],
        )
    if service.traces is not None:
        app = service.traces.around(app)
    if service.http.log_requests:
        app = RequestLog(app, service.log_hasher)
    return RequestIds(app)


def create_api(service: Service) -> FastAPI:
    """The routes."""
    # FastAPI's pages for the document load scripts from a CDN, which users may not reach.
    # A redirect to a path without its slash would lead to the Host that the request names.
    app = FastAPI(
        title="Baton",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.admissions = service.admissions
    model, limits, status = service.model, service.http.limits, service.status
    generator, membership = service.generator, service.membership
    admin_only = admin_guard(service.keys, service.http.host, service.http.allowed_origins)
    guards = fleet_guards(service.keys, service.http.host, admin_only)
    desk = Desk(generator, model, limits)
    for routes in (
        generate_routes(desk),
        openai_routes(desk, status.context_length),
        responses_routes(desk),
        messages_routes(desk),
        health_routes(status, generator, model, membership),
        info_routes(status, membership, model, service.metrics, limits, service.flags),
        fleet_admin_routes(membership, service.changes, guards),
        live_routes(service.live),
        control_routes(membership, service.abort, admin_only),
    ):
        app.router.routes += routes.routes
    serve_page(app)
    for kind, answer in (
        (RequestError, _on_request_error),
        (ClientDisconnect, _on_disconnect),
        (RequestValidationError, _on_wrong_input),
        (HTTPException, _on_http_error),
    ):
        app.add_exception_handler(kind, _without_frames(answer))
    app.add_exception_handler(Exception, _on_bug)
    keys_are_set = service.keys.has_clients or service.keys.has_admins
    document = functools.cache(lambda: openapi_document(app, with_keys=keys_are_set))
    app.openapi = document  # type: ignore[method-assign]
    return app


def _without_frames(answer: _Handler) -> _Handler:
    """`answer`, after which the error does not hold the frames that raised it, with the request and its body.

    FastAPI's frame has a name for the error, so that both would wait for the cycle collector.
    """

    async def answered(request: Request, error: Exception) -> Response:
        response = await answer(request, error)
        raised: BaseException | None = error
        while raised is not None:
            raised.__traceback__, raised = None, raised.__cause__ or raised.__context__
        return response

    return answered


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    note_error(request.scope, error)
    return error_response(error, request.url.path)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client is gone; the log has the status


async def _on_wrong_input(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _on_request_error(request, wrong_input(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientDisconnect):  # FastAPI raises it as an error of the body
        return await _on_disconnect(request, error)
    message = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    response = error_response(RequestError(message, status=error.status_code), request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, _: Exception) -> Response:
    crash("request_failed", path=request.url.path)
    return error_response(RequestError("internal error", status=500), request.url.path)
