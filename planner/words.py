"""Figures as text: three digits, with their units."""

from __future__ import annotations

HOW_TO_INSTALL = "pip install 'baton-serve[plan]', in a clone .venv/bin/pip install -e '.[plan]'"
"""What planning needs beside what serves."""


def number(value: float) -> str:
    """1,234 or 12.3 or 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """400 ms, 1.25 s."""
    if abs(value) >= 1:
        return f"{number(value)} s"
    return f"{1000 * value:.3g} ms" if value else "0 s"
