"""A scheduling decision: which tokens of which requests the next forward computes."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Each computes the token that was sampled last, which the host need not know yet."""

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


def schedule(req: Req, length: int, *, samples: bool) -> ScheduledReq:
    """Take the next `length` tokens of `req` into a batch; its arithmetic moves on at once."""
    assert req.kv is not None
    start = req.kv.kv_allocated_len
    req.kv.kv_allocated_len = start + length
    position = req.num_sampled if samples else None
    req.num_sampled += samples
    return ScheduledReq(req, req.generation, start, length, position)
