"""`/start_profile` and `/stop_profile`: traces of all nodes, each written on the node's own disk."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from router.http.admin_guard import AdminGuard
from router.http.body import Body, Refused, parse
from router.http.limits import HttpLimits
from router.http.responses import json_response, read_body
from router.nodes.fleet_answers import Traces
from router.nodes.membership import Membership
from shared.errors import RequestError
from shared.protocol.messages import Answered, StartProfile, StopProfile

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 300.0
_MAX_STEPS = 100_000


class StartProfileBody(Body):
    """Field names are SGLang's; where traces go is the node's `--profile-dir`, not the client's."""

    num_steps: Annotated[
        int, Field(ge=0, le=_MAX_STEPS, description="So many forwards; 0: until /stop_profile.")
    ] = 0
    with_stack: Annotated[bool, Field(description="With the Python stack of each operation.")] = False
    record_shapes: Annotated[bool, Field(description="With the shapes of each operation's inputs.")] = False
    output_dir: Annotated[Any, Refused(why="the node's --profile-dir to say")] = None


def profile_routes(membership: Membership, limits: HttpLimits, admin_only: AdminGuard) -> APIRouter:
    """The routes."""
    router = APIRouter(dependencies=[Depends(admin_only)])

    @router.post("/start_profile", response_model=None)
    async def start_profile(request: Request) -> Response:
        """Trace every live node for `num_steps` steps, or until /stop_profile."""
        body = parse(StartProfileBody, await read_body(request, limits.max_body_bytes) or b"{}")

        def message(call_id: int) -> StartProfile:
            return StartProfile(call_id, body.num_steps or None, body.with_stack, body.record_shapes)

        return _told(await membership.call(message, _START_TIMEOUT_S))

    @router.post("/stop_profile", response_model=None)
    async def stop_profile() -> Response:
        """Write the traces."""
        return _told(await membership.call(StopProfile, _STOP_TIMEOUT_S))

    return router


def _told(answers: dict[str, Answered]) -> Response:
    if not answers:
        raise RequestError("there is no live node to profile", status=503, code="no_node")
    refused = {node_id: answer.detail for node_id, answer in sorted(answers.items()) if not answer.ok}
    traces = {node_id: answer.detail for node_id, answer in sorted(answers.items()) if answer.ok}
    if refused:
        others = f"; done on {', '.join(traces)}" if traces else ""
        raise RequestError("; ".join(f"{node_id}: {why}" for node_id, why in refused.items()) + others)
    return json_response(Traces(traces=traces))
