"""Figures as text, for the report: three digits, with their units."""

from __future__ import annotations

from planner.answer import Estimate


def number(value: float) -> str:
    """1,234 or 12.3 or 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def short(value: float) -> str:
    """For a narrow cell: 12k, 3.4M."""
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * power or (power > 1e3 and abs(value) >= power):
            return f"{value / power:.3g}{unit}"
    return number(value)


def seconds(value: float | None) -> str:
    """400 ms, 1.25 s; a dash for what nothing is known of."""
    if value is None:
        return "–"
    if abs(value) >= 1:
        return f"{number(value)} s"
    return f"{1000 * value:.3g} ms" if value else "0 s"


def percent(share: float) -> str:
    """A share, 97 %. What is not all of it is not shown as 100 %, nor what is more than nothing as 0 %."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
    return f"{100 * share:.0f} %"


def count(value: float) -> str:
    """Of tokens and requests: whole."""
    return f"{value:,.0f}"


def estimate(one: Estimate) -> str:
    """12.3 (11.9 to 12.7); one figure alone where its interval is not known."""
    if one.low == one.high:
        return number(one.value)
    return f"{number(one.value)} ({number(one.low)} to {number(one.high)})"


def share(one: Estimate) -> str:
    """97 % (95 to 99)."""
    if one.low == one.high:
        return percent(one.value)
    return f"{percent(one.value)} ({100 * one.low:.0f} to {100 * one.high:.0f})"


def signed(value: float) -> str:
    """+1.2, -3, or 0."""
    return f"{value:+.3g}" if value else "0"


def signed_seconds(value: float) -> str:
    """+12.3 ms."""
    return f"{'+' if value > 0 else ''}{seconds(value)}"


def bytes_s(value: float) -> str:
    """1.2 GB/s."""
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= power:
            return f"{value / power:.3g} {unit}/s"
    return f"{value:.0f} B/s"
