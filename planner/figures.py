"""What clients saw of one run of a fleet, simulated or measured, as distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good if its time to first token and its mean time between tokens are within these seconds."""

    ttft_s: float
    itl_s: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Seconds from the moment at which it was sent."""

    ttft_s: float
    e2e_s: float
    num_tokens: int

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens, as aiperf and vLLM's TPOT have it; 0 for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def is_good(self, slo: Slo) -> bool:
        """Whether it meets both bounds."""
        return self.ttft_s <= slo.ttft_s and self.itl_s <= slo.itl_s


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of seconds; infinite where no request was served. JSON has null for that."""

    mean: float
    p50: float
    p90: float
    p99: float


def arrival_seconds(arrivals: Sequence[float]) -> float:
    """The seconds in which requests arrived, of which each stands for one gap; 0 if they all came at once.

    `arrivals` are in order. n requests that are a second apart took n seconds, though the last came n - 1 after the
    first: otherwise a rate computed from a short trace would be too high.
    """
    gaps = len(arrivals) - 1
    return (arrivals[-1] - arrivals[0]) * (gaps + 1) / gaps if gaps else 0.0


def distribution(values: npt.ArrayLike) -> Distribution:
    """Of values. Of no value everything is infinite."""
    values = np.asarray(values, dtype=float)
    if not values.size:
        return Distribution(mean=math.inf, p50=math.inf, p90=math.inf, p99=math.inf)
    p50, p90, p99 = (quantile(values, share) for share in (0.5, 0.9, 0.99))
    return Distribution(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def quantile(values: npt.ArrayLike, share: float) -> float:
    """The smallest of the values that at least this share of them are not above."""
    ordered = np.sort(np.asarray(values, dtype=float))
    return float(ordered[max(0, math.ceil(share * len(ordered) * (1 - 1e-12)) - 1)])
