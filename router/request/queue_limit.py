"""The bound on sequences that wait. A request beyond it gets a 429 at once, with the time after which to retry.

    QueueGate, before the body is read       429 if the queue is full
    places.hold(num_sequences)               429 if they do not all fit; else each has a place
    ... tokenize ...
    async with generator.open(..., places):  each is dispatched: the WaitingQueue has it, and its place is free

A sequence is queued from `hold` to its first token, whatever it waits for: the tokenizer, a node's inbox, pages or a
batch. A sequence that generates is not counted. Sequences count, not HTTP requests; a request is admitted with all of
its sequences or not at all. Each router process has its own bound. Priorities do not count here.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from types import TracebackType
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from router.dispatch.waiting_queue import WaitingQueue, retry_after_s
from router.http.api_keys import cache_owner_of
from router.http.responses import refuse
from shared.errors import RequestError

_PLACES = "queue_places"


class QueueLimit:
    """Counts the sequences that wait, up to `max_queued`. `on_rejected` is called for each refused request."""

    def __init__(self, queue: WaitingQueue, max_queued: int, on_rejected: Callable[[], None]) -> None:
        self._queue = queue
        self._max_queued = max_queued
        self._on_rejected = on_rejected
        self._num_held = 0

    @property
    def num_queued(self) -> int:
        """Sequences without a first token, dispatched or not."""
        return self._num_held + len(self._queue)

    def places(self, cache_owner: bytes = b"") -> QueuePlaces:
        """The places of one request, a context. Raises RequestError when the queue is full.

        `cache_owner` is ApiKeys.cache_owner of the client.
        """
        self._check(1)
        return QueuePlaces(self, cache_owner)

    def hold(self, num_sequences: int) -> None:
        """Take places. Raises RequestError, and takes none, when too few are free."""
        if num_sequences > self._max_queued:
            raise RequestError(
                f"{num_sequences} sequences in one request; at most {self._max_queued} may wait at a time "
                "(--max-queued-requests)"
            )
        self._check(num_sequences)
        self._num_held += num_sequences

    def release(self, num_sequences: int) -> None:
        """Free places that `hold` took."""
        self._num_held -= num_sequences

    def _check(self, num_sequences: int) -> None:
        num_queued = self.num_queued
        if num_queued + num_sequences <= self._max_queued:
            return
        self._on_rejected()
        num_free = max(self._max_queued - num_queued, 0)
        if num_free == 0:
            why = f"the queue is full: all {self._max_queued} places are taken"
        else:
            why = f"{num_sequences} places in the queue are needed, and {num_free} of {self._max_queued} are free"
        raise RequestError(
            f"{why}; try again later",
            status=429,
            code="queue_full",
            retry_after_s=retry_after_s(self._queue.wait_s(num_queued)),
        )


class QueuePlaces:
    """The places that one request holds, each until its sequence is dispatched or the with block ends."""

    def __init__(self, limit: QueueLimit, cache_owner: bytes) -> None:
        self._limit = limit
        self.cache_owner = cache_owner
        self._num_held = 0

    def __enter__(self) -> QueuePlaces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the places of sequences that were not dispatched."""
        self._limit.release(self._num_held)
        self._num_held = 0

    def hold(self, num_sequences: int) -> None:
        """Take places, once. Raises RequestError with status 429 when too few are free."""
        assert self._num_held == 0
        self._limit.hold(num_sequences)
        self._num_held = num_sequences

    def dispatched(self) -> None:
        """Free the place of a sequence that the WaitingQueue now has."""
        assert self._num_held > 0
        self._num_held -= 1
        self._limit.release(1)


class QueueGate:
    """Middleware for the routes at `paths`. If the queue is full, it answers 429 before the body is read."""

    def __init__(self, app: ASGIApp, limit: QueueLimit, paths: Set[str]) -> None:
        self._app = app
        self._limit = limit
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its QueuePlaces, or answer 429."""
        if (
            scope["type"] != "http"
            or scope["path"] not in self._paths
            or scope["method"] not in ("POST", "PUT")
        ):
            await self._app(scope, receive, send)
            return
        try:
            places = self._limit.places(cache_owner_of(scope))
        except RequestError as e:
            await refuse(e, scope, receive, send)
            return
        with places:
            scope.setdefault("state", {})[_PLACES] = places
            await self._app(scope, receive, send)


async def _places_of(request: Request) -> QueuePlaces:
    places: QueuePlaces = getattr(request.state, _PLACES)
    return places


PlacesOfRequest = Annotated[QueuePlaces, Depends(_places_of)]
"""The parameter of a handler behind a QueueGate."""
