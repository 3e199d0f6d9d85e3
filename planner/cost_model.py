"""How long a forward takes: the shape of DistServe's and Splitwise's latency models, fitted to a measured run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one forward.

    prefill of n tokens: a + b n + c n^2. The square is attention; a chunk [start, start + length) costs its share,
    c ((start + length)^2 - start^2), so that chunks of a prompt cost together what the whole does, plus a each.

    decode: d + e batch + f kv_tokens, over the batch and the tokens of KV that it reads; without d when it is part
    of a prefill's forward, which reads the weights anyway.

    step_s: the scheduler's own work before each launch, in which overlap hides the device's time and vice versa.
    """

    a: float
    b: float
    c: float
    d: float
    e: float
    f: float
    step_s: float = 0.0

    def extend_s(self, spans: Iterable[tuple[int, int]]) -> float:
        """One forward over (start, length) spans of several prompts."""
        seconds = self.a
        for start, length in spans:
            end = start + length
            seconds += self.b * length + self.c * (end * end - start * start)
        return seconds

    def decode_s(self, batch: int, kv_tokens: int, *, beside_prefill: bool = False) -> float:
        """One decode step."""
        return (0.0 if beside_prefill else self.d) + self.e * batch + self.f * kv_tokens
