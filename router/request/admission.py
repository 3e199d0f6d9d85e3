"""What a request takes before its sequences are sent: places in the queue, and its names.

    QueueGate, before the body is read       429 if the queue is full
    places.hold(num_sequences)               429 if they do not all fit; else each has a place
    claim.take(rids, ...)                    refused if a rid is in use; from here on /abort_request finds the request
    ... tokenize ...
    async with generator.open(..., places):  each is dispatched: the WaitingQueue has it, and its place is free;
                                             the rids are released when all sequences have ended

A sequence is queued from `hold` to its first token, whatever it waits for: the tokenizer, a node's inbox, pages or a
batch. A sequence that generates is not counted. Sequences count, not HTTP requests; a request is admitted with all of
its sequences or not at all. Each router process has its own bound. Priorities do not count here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from router.dispatch.running_req import RunningReq
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
        if scope["path"] not in self._paths or scope["method"] not in ("POST", "PUT"):
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


# ------------------------------------------------------------------------------------------------- names
@dataclass
class _Prompt:
    """The sequences of one prompt that were sent, and the number of others. With an `abort_message` none is sent."""

    num_unsent: int
    reqs: list[RunningReq] = field(default_factory=list)
    abort_message: str | None = None


class LiveRids:
    """Request ids of clients, from before their prompts are tokenized until their requests have ended."""

    def __init__(self) -> None:
        self._holders: dict[str, list[Claim]] = {}

    def __len__(self) -> int:
        """The number of rids in use."""
        return len(self._holders)

    def claim(self) -> Claim:
        """A claim for the rids of one request, a context."""
        return Claim(self._holders)

    def find(self, rid: str | None) -> list[Claim]:
        """The claims on this rid, of a prompt or of a whole batch; all claims for None."""
        if rid is not None:
            return list(self._holders.get(rid, ()))
        return list(dict.fromkeys(claim for holders in self._holders.values() for claim in holders))


class Claim:
    """The rids of one request: one for each prompt, and that of the batch."""

    def __init__(self, holders: dict[str, list[Claim]]) -> None:
        self._holders = holders
        self._prompts: dict[str, _Prompt] = {}
        self._names: list[str] = []
        self._handed_over = False

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the rids, unless they were handed over."""
        if not self._handed_over:
            self.release()

    def take(
        self, rids: Sequence[str], num_sequences: Sequence[int], *, whole: str | None, shared: bool
    ) -> None:
        """Take the rids of all prompts, which become `num_sequences` each, and that of the `whole` batch.

        Raises RequestError, and takes none, if one is in use and they are not `shared`.
        """
        assert not self._names
        counts = Counter(rids)
        names = list(dict.fromkeys(rids if whole is None else (*rids, whole)))
        if not shared:
            for name in names:
                if name in self._holders or counts[name] > 1:
                    raise RequestError(
                        f"rid {name!r} is the name of another request that is running", param="rid"
                    )
        self._prompts = {rid: _Prompt(num) for rid, num in zip(rids, num_sequences, strict=True)}
        self._names = names
        for name in names:
            self._holders.setdefault(name, []).append(self)

    def hand_over(self) -> None:
        """Keep the rids beyond the end of the with block, until `release`."""
        self._handed_over = True

    def release(self) -> None:
        """Free the rids. A shared one is free when all of its requests have ended. A second call has no effect."""
        for name in self._names:
            self._holders[name].remove(self)
            if not self._holders[name]:
                del self._holders[name]
        self._names = []

    def abort(self, name: str | None, message: str) -> tuple[int, list[RunningReq]]:
        """Keep the prompt of this rid from being sent, or all prompts if it is the batch's or None.

        Returns the number of sequences that will not be sent, and those that were sent, which the caller ends.
        """
        prompt = self._prompts.get(name) if name is not None else None
        num_unsent, running = 0, []
        for each in [prompt] if prompt is not None else self._prompts.values():
            if each.abort_message is None:
                num_unsent += each.num_unsent
                each.abort_message = message
            running += [req for req in each.reqs if not req.ended]
        return num_unsent, running

    def abort_message(self, rid: str) -> str | None:
        """Why the prompt `rid` must not be sent; None if it may be."""
        return self._prompts[rid].abort_message

    def sent(self, rid: str, req: RunningReq) -> None:
        """Note that a sequence of the prompt `rid` was sent, or has ended unsent."""
        prompt = self._prompts[rid]
        prompt.num_unsent -= 1
        prompt.reqs.append(req)
