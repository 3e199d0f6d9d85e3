"""How long a forward takes: the latency models of DistServe and Splitwise with a floor, fitted to a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
"""A cost, as a file has it: none is higher than a day."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one forward, and of the scheduler's own work before it.

    prefill of n tokens: a + b n + c n^2, and at least floor_s. The square is attention; a chunk
    [start, start + length) costs its share, c ((start + length)^2 - start^2), so that chunks of a prompt cost
    together what the whole does, plus a each. The floor is a forward of few tokens: it reads all weights and fills
    its tiles, as one of more tokens does.

    decode: d + e batch + f kv_tokens, over the batch and the tokens of KV that it reads; without d when it is part
    of a prefill's forward, which reads the weights anyway.

    the scheduler: step_s + step_request_s n for a forward of n requests. Overlap hides it behind the forward before,
    or that behind it.
    """

    a: Seconds
    b: Seconds
    c: Seconds
    d: Seconds
    e: Seconds
    f: Seconds
    floor_s: Seconds = 0.0
    step_s: Seconds = 0.0
    step_request_s: Seconds = 0.0

    def extend_s(self, spans: Iterable[tuple[int, int]]) -> float:
        """One forward over (start, length) spans of several prompts."""
        seconds = self.a
        for start, length in spans:
            end = start + length
            seconds += self.b * length + self.c * (end * end - start * start)
        return max(seconds, self.floor_s)

    def decode_s(self, batch: int, kv_tokens: int, *, beside_prefill: bool = False) -> float:
        """One decode step."""
        return (0.0 if beside_prefill else self.d) + self.e * batch + self.f * kv_tokens

    def host_s(self, num_requests: int) -> float:
        """The scheduler's work for one forward of so many requests."""
        return self.step_s + self.step_request_s * num_requests
