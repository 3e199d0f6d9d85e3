"""The bound on what waits: beyond it a request is refused at once, with the time after which to try again.

    with admission.ticket() as ticket:           429 if the queue is full, before the body is read
        ticket.take(num_sequences)               429 if they do not all fit; their places are held from here
        ... tokenize ...
        async with generator.open(..., ticket):  each is dispatched: it is queued now, and its held place is free

A sequence is queued from `take` to its first token, whoever it waits for: the tokenizer, a node's inbox, pages, its
turn. What already generates is never refused or counted. Sequences count, not HTTP requests; a request is let in with
all of its sequences or not at all. The bound is one of this router process; other routers of a fleet have their own.
Priorities do not matter here: they say who is served first, not who may wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from router.dispatch.first_token_queue import FirstTokenQueue
from shared.errors import RequestError

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore what is longer, and retry sooner."""


class Admission:
    """Lets requests in. `on_rejected` is called for each that is refused."""

    def __init__(self, queue: FirstTokenQueue, max_queued: int, on_rejected: Callable[[], None]) -> None:
        self._queue = queue
        self._max_queued = max_queued
        self._on_rejected = on_rejected
        self._num_held = 0

    @property
    def num_queued(self) -> int:
        """Sequences without a first token, held places included."""
        return self._num_held + len(self._queue)

    def ticket(self) -> Ticket:
        """For one request, to be used in a with block. Raises RequestError when the queue is full already."""
        self._check(1)
        return Ticket(self)

    def hold(self, num_sequences: int) -> None:
        """Take places. Raises RequestError when there are not as many; then none is taken."""
        if num_sequences > self._max_queued:
            raise RequestError(
                f"{num_sequences} sequences in one request; at most {self._max_queued} may wait at a time "
                "(--max-queued-requests)"
            )
        self._check(num_sequences)
        self._num_held += num_sequences

    def let_go(self, num_sequences: int) -> None:
        """The places are free again."""
        self._num_held -= num_sequences

    def _check(self, num_sequences: int) -> None:
        num_queued = self.num_queued
        if num_queued + num_sequences <= self._max_queued:
            return
        self._on_rejected()
        wait_s = math.ceil(min(self._queue.wait_s(num_queued), MAX_RETRY_AFTER_S))
        num_free = max(self._max_queued - num_queued, 0)
        if num_free == 0:
            why = f"the queue is full: all {self._max_queued} places are taken"
        else:
            why = f"{num_sequences} places in the queue are needed, and {num_free} of {self._max_queued} are free"
        raise RequestError(
            f"{why}; try again later",
            status=429,
            code="queue_full",
            retry_after_s=max(wait_s, MIN_RETRY_AFTER_S),
        )


class Ticket:
    """The places that one request holds, each until its sequence is dispatched or the with block ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_held = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever was not dispatched will not be."""
        self._admission.let_go(self._num_held)
        self._num_held = 0

    def take(self, num_sequences: int) -> None:
        """Take places, once. Raises RequestError with status 429 when there are not as many."""
        assert self._num_held == 0
        self._admission.hold(num_sequences)
        self._num_held = num_sequences

    def dispatched(self) -> None:
        """One of the sequences is in the queue now."""
        assert self._num_held > 0
        self._num_held -= 1
        self._admission.let_go(1)
