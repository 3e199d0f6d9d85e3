"""A scheduling decision as a value: which tokens the next forward computes, and which KV is copied before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.kvcache.allocator import PageCopy
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import ReqKey
from shared.scheduling.req import Req


@dataclass(frozen=True, slots=True)
class ScheduledReq:
    """Tokens [start, start + length) of `req` are computed; `position` is the output position sampled, if any."""

    req: Req
    generation: int
    start: int
    length: int
    position: int | None

    @property
    def is_stale(self) -> bool:
        """True when the request was retracted, aborted or finished after this was scheduled."""
        return self.generation != self.req.generation

    @property
    def is_in_flight(self) -> bool:
        """True until its KV is committed, unless it is stale."""
        kv = self.req.kv
        return not self.is_stale and kv is not None and kv.kv_committed_len < self.start + self.length


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """One forward, on the host: an extend over prompt tokens, a decode step of one token each, or both at once."""

    extends: tuple[ScheduledReq, ...] = ()
    decodes: tuple[ScheduledReq, ...] = ()
    """Each computes the newest token of its request. The device reads it from the FutureMap."""
    future_writes: tuple[tuple[int, int], ...] = ()
    """(row, token) of each of `decodes` whose token the host knows: written to the FutureMap before it is read.

    The others read what an earlier forward sampled, which need not have reached the host yet.
    """

    @property
    def items(self) -> tuple[ScheduledReq, ...]:
        """All of them, in the order of the forward."""
        return self.extends + self.decodes

    @property
    def is_extend(self) -> bool:
        """True when prompt tokens are computed, alone or with a decode step beside them."""
        return bool(self.extends)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes."""
        return sum(item.length for item in self.items)


@dataclass(frozen=True, slots=True)
class KVCopy:
    """A copy of a request's KV to the host, or back, ahead of the forward of the same plan.

    A copy back makes the KV of `req` whole up to `kv_len` tokens when it has landed, unless `req` has been retracted
    again by then: `num_retractions` is how often it had been when the copy was decided on.
    """

    req: Req
    num_retractions: int
    pages: PageCopy
    kv_len: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that follows from one call of `Batcher.plan`. The `Launcher` gets nothing else.

    A plan refers to the `Req`s of its node, and has ints beside them. With keys in the place of the requests it can
    be logged, compared and sent: tests do so with each plan, and make it a plan again (`tests/plan_records.py`).
    """

    batch: ScheduleBatch | None = None
    copies: tuple[KVCopy, ...] = ()
    unservable: tuple[ReqKey, ...] = ()
    """Requests that not even the empty pool could hold. They are in no queue of the Batcher and must be ended."""
    given_up: tuple[ReqKey, ...] = ()
    """Requests that are being moved and whose pages are needed now: their moves are to be given up."""
    move_wanted: tuple[ReqKey, ...] = ()
    """Requests that had better be moved to another node: pages will be short here, and it costs least."""


def schedule(req: Req, length: int, *, samples: bool) -> ScheduledReq:
    """Take the next `length` tokens of `req` into a batch. The lengths of `req` count them from now on."""
    assert req.kv is not None
    start = req.kv.kv_allocated_len
    req.kv.kv_allocated_len = start + length
    position = req.num_sampled if samples else None
    req.num_sampled += samples
    return ScheduledReq(req, req.generation, start, length, position)


def schedule_step(reqs: Sequence[Req], ledger: KVLedger, max_behind_tokens: int) -> ScheduleBatch:
    """A decode step of `reqs`; the caller has counted the pages.

    The token that a request computes is in the FutureMap from an earlier forward, or the host writes it there. A
    request that has jumped computes the tokens that it jumped over as an extend. All of these extends share
    `max_behind_tokens`, so that the step stays short. A request that finds none left waits for the next step.
    """
    behind: list[Req] = []
    writes: list[tuple[int, int]] = []
    for req in reqs:
        kv = req.kv
        assert kv is not None
        num_known = len(req.ids) - kv.kv_allocated_len
        if num_known > 1:
            behind.append(req)
        elif num_known == 1:
            writes.append((kv.row, req.ids[-1]))
    extends: list[ScheduledReq] = []
    for req in behind:
        length = min(num_behind(req), max_behind_tokens)
        if length > 0:
            extends.append(_grow_and_schedule(req, length, ledger, samples=length == num_behind(req)))
            max_behind_tokens -= length
    stepping = [req for req in reqs if req not in behind] if behind else reqs
    decodes = tuple(_grow_and_schedule(req, 1, ledger, samples=True) for req in stepping)
    return ScheduleBatch(tuple(extends), decodes, tuple(writes))


def num_behind(req: Req) -> int:
    """Known tokens that the next step of a running request has to compute: one, or more after a jump."""
    return max(len(req.ids) - req.kv_len, 1)


def _grow_and_schedule(req: Req, length: int, ledger: KVLedger, *, samples: bool) -> ScheduledReq:
    assert req.kv is not None
    grown = ledger.grow(req.kv, req.kv.kv_allocated_len + length)
    assert grown, "the pages were counted a moment ago"
    return schedule(req, length, samples=samples)
