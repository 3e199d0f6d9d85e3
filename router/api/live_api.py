"""`/live`: the state of the fleets for the page. Prometheus has `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from router.api.live_feed import LiveEvent
from router.api.live_state import LiveState
from router.http.responses import EventStream, event_stream, stream_response


def live_routes(live: LiveState) -> APIRouter:
    """The feed, and one event of it."""
    router = APIRouter(tags=["State"])

    @router.get("/live", status_code=200, response_class=EventStream, responses=event_stream(LiveEvent))
    async def feed(request: Request) -> Response:
        """Server-sent events, one a second: router, nodes and samples (see `router/api/live_feed.py`)."""
        return await stream_response(request, live.feed())

    @router.get("/live/state")
    async def state() -> LiveEvent:
        """The same as one JSON object, with the samples of the last ten minutes."""
        return live.event()

    return router
