"""`/start_profile` and `/stop_profile`: traces of all nodes, each written on the node's own disk."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from router.http.api_keys import AdminGuard
from router.http.body import Body, JsonRoute, Refused, about
from router.nodes.fleet_answers import Traces
from router.nodes.membership import Membership
from shared.errors import RequestError
from shared.protocol.messages import Answered, StartProfile, StopProfile

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 300.0
_MAX_STEPS = 100_000


class StartProfileBody(Body):
    """Field names are SGLang's; where traces go is the node's `--profile-dir`, not the client's."""

    num_steps: int = about("So many forwards; 0: until /stop_profile.", 0, ge=0, le=_MAX_STEPS)
    with_stack: bool = about("With the Python stack of each operation.", False)
    record_shapes: bool = about("With the shapes of each operation's inputs.", False)
    output_dir: Annotated[Any, Refused(why="the node's --profile-dir to say")] = None


def profile_routes(membership: Membership, admin_only: AdminGuard) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Operation"], dependencies=[Depends(admin_only)], route_class=JsonRoute)

    @router.post("/start_profile")
    async def start_profile(body: StartProfileBody | None = None) -> Traces:
        """Trace every live node for `num_steps` steps, or until /stop_profile."""
        asked = body or StartProfileBody()

        def message(call_id: int) -> StartProfile:
            return StartProfile(call_id, asked.num_steps or None, asked.with_stack, asked.record_shapes)

        return _traces(await membership.call(message, _START_TIMEOUT_S))

    @router.post("/stop_profile")
    async def stop_profile() -> Traces:
        """Write the traces."""
        return _traces(await membership.call(StopProfile, _STOP_TIMEOUT_S))

    return router


def _traces(answers: dict[str, Answered]) -> Traces:
    if not answers:
        raise RequestError("there is no live node to profile", status=503, code="no_node")
    refused = {node_id: answer.detail for node_id, answer in sorted(answers.items()) if not answer.ok}
    traces = {node_id: answer.detail for node_id, answer in sorted(answers.items()) if answer.ok}
    if refused:
        others = f"; done on {', '.join(traces)}" if traces else ""
        raise RequestError("; ".join(f"{node_id}: {why}" for node_id, why in refused.items()) + others)
    return Traces(traces=traces)
