"""The axes of the report's charts.

Along a chart, places are percent of its width, so that it fits any page without a script and its letters keep their
size. Down it, they are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """A number beside an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Values to percent of a width; with `is_log`, by their logarithm. What lies outside goes to the end."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Percent."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(100 * (value - low) / (high - low), 2)

    def ticks(self, text: Callable[[float], str], num: int = 4) -> tuple[Tick, ...]:
        """About `num` round values."""
        return tuple(Tick(self.at(value), text(value)) for value in self._round_values(num))

    def _round_values(self, num: int) -> list[float]:
        if not self.is_log or self.high < 5 * self.low:
            step = nice_step((self.high - self.low) / num)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits: tuple[int, ...] = (1, 2, 5) if math.log10(self.high / self.low) < 1.5 else (1,)
        every = max(1, len(decades) // (num + 2))
        values = [digit * 10.0**decade for decade in decades[::every] for digit in digits]
        return [value for value in values if self.low <= value * 1.001 and value <= self.high * 1.001]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def linear(values: Sequence[float], num: int = 4) -> Scale:
    """From 0 to the next round value above all of them."""
    most = max(values, default=0.0)
    if most <= 0:
        return Scale(0.0, 1.0)
    step = nice_step(most / num)
    return Scale(0.0, step * math.ceil(most / step - 1e-9))


def logarithmic(values: Sequence[float]) -> Scale:
    """Around all positive values, with some room at both ends."""
    known = [value for value in values if 0 < value < math.inf] or [1.0]
    return Scale(min(known) / 1.25, max(known) * 1.25, is_log=True)
