"""What a request takes before its sequences are sent: a place in the queue for each, and its names.

    AdmissionOfRequest, a route's parameter     429 if the queue is full
    admission.take(rids, ...)                   429 if the sequences do not all fit, else each has a place; refused if
                                                a rid is in use, else /abort_request finds the request from here on
    ... tokenize ...
    async with generator.open(..., admission)   each is dispatched: the WaitingQueue has it, and its place is free;
                                                the rids are free when all sequences have ended

A sequence is queued from `take` to its first token, whatever it waits for: the tokenizer, a node's inbox, pages or a
batch. A sequence that generates is not counted. Sequences count, not HTTP requests; a request is admitted with all of
its sequences or not at all. Each router process has its own bound. Priorities do not count here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from router.dispatch.fleet_view import WaitingQueue, retry_after_s
from router.dispatch.running_req import RunningReq
from router.http.api_keys import cache_owner_of
from shared.errors import RequestError


class Admissions:
    """The places and rids that are taken. `on_rejected` is called for each request that finds too few places."""

    def __init__(self, queue: WaitingQueue, max_queued: int, on_rejected: Callable[[], None]) -> None:
        self._queue = queue
        self._max_queued = max_queued
        self._on_rejected = on_rejected
        self._num_held = 0
        self.holders: dict[str, list[Admission]] = {}
        """Of each rid in use."""

    @property
    def num_queued(self) -> int:
        """Sequences without a first token, dispatched or not."""
        return self._num_held + len(self._queue)

    def admit(self, cache_owner: bytes = b"") -> Admission:
        """The admission of one request, a context. Raises RequestError when the queue is full.

        `cache_owner` is ApiKeys.cache_owner of the client.
        """
        self._check(1)
        return Admission(self, is_queued=True, cache_owner=cache_owner)

    def beside_the_queue(self) -> Admission:
        """The admission of a probe, which takes no place: a service whose queue is full works."""
        return Admission(self, is_queued=False)

    def find(self, rid: str | None) -> list[Admission]:
        """Those with this rid, of a prompt or of a whole batch; all for None."""
        if rid is not None:
            return list(self.holders.get(rid, ()))
        return list(dict.fromkeys(one for holders in self.holders.values() for one in holders))

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
            retry_after_s=retry_after_s(self._queue.wait_s),
        )


@dataclass
class _Prompt:
    """The sequences of one prompt that were sent, and the number of others. With an `abort_message` none is sent."""

    num_unsent: int
    reqs: list[RunningReq] = field(default_factory=list)
    abort_message: str | None = None


class Admission:
    """The places of one request, each until its sequence is sent, and the rids of its prompts and of the batch."""

    def __init__(self, admissions: Admissions, *, is_queued: bool, cache_owner: bytes = b"") -> None:
        self.is_queued = is_queued
        self.cache_owner = cache_owner
        self._admissions = admissions
        self._num_held = 0
        self._prompts: dict[str, _Prompt] = {}
        self._names: list[str] = []

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the rids, and the places of sequences that were not sent."""
        self.release_rids()
        self._admissions.release(self._num_held)
        self._num_held = 0

    def take(
        self, rids: Sequence[str], num_sequences: Sequence[int], *, whole: str | None, shared: bool
    ) -> None:
        """Take the rids of all prompts and of the `whole` batch, and `num_sequences` places for each prompt. Once.

        Raises RequestError with status 429 when too few places are free, and another, with no rid taken, if one is in
        use and they are not `shared`.
        """
        assert not self._names
        if self.is_queued:
            self._admissions.hold(sum(num_sequences))
            self._num_held = sum(num_sequences)
        counts, holders = Counter(rids), self._admissions.holders
        names = list(dict.fromkeys(rids if whole is None else (*rids, whole)))
        if not shared:
            for name in names:
                if name in holders or counts[name] > 1:
                    raise RequestError(
                        f"rid {name!r} is the name of another request that is running", param="rid"
                    )
        self._prompts = {rid: _Prompt(num) for rid, num in zip(rids, num_sequences, strict=True)}
        self._names = names
        for name in names:
            holders.setdefault(name, []).append(self)

    def release_rids(self) -> None:
        """Free the rids. A shared one is free when all of its requests have ended. A second call has no effect."""
        holders = self._admissions.holders
        for name in self._names:
            holders[name].remove(self)
            if not holders[name]:
                del holders[name]
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
        """Note that a sequence of the prompt `rid` was sent, or has ended unsent. Its place is free."""
        prompt = self._prompts[rid]
        prompt.num_unsent -= 1
        prompt.reqs.append(req)
        if self.is_queued:
            self._num_held -= 1
            self._admissions.release(1)


async def _admission_of(request: Request) -> AsyncIterator[Admission]:
    """The admission, until the answer is sent. Raises RequestError when the queue is full."""
    admissions: Admissions = request.app.state.admissions
    with admissions.admit(cache_owner_of(request.scope)) as admission:
        yield admission


AdmissionOfRequest = Annotated[Admission, Depends(_admission_of)]
"""The parameter of a route whose requests wait for a first token."""
