"""Figures as text: three digits, with their units."""

from __future__ import annotations

from planner.answer import Estimate

HOW_TO_INSTALL = "pip install 'baton-serve[plan]', in a clone .venv/bin/pip install -e '.[plan]'"
"""What planning needs beside what serves."""


def seconds(value: float) -> str:
    """400 ms, 1.25 s."""
    if abs(value) >= 1:
        return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.3g} s"
    return f"{1000 * value:.3g} ms" if value else "0 s"


def percent(share: Estimate) -> str:
    """97% (95 to 99)."""
    return f"{share.value:.0%} ({100 * share.low:.0f} to {100 * share.high:.0f})"


def rate(value: float) -> str:
    """4.2 requests/s."""
    return f"{value:.3g} requests/s"
