"""The links of a node in words, for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.protocol.messages import LinkReport


def links_words(links: Iterable[LinkReport]) -> list[str]:
    """A text for each transport and each set of reasons why it is not a better one.

    It has what rehearsals measured, and how many of these links are much slower now.
    """
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[LinkReport]] = {}
    for link in links:
        alike.setdefault((link.transport, tuple(link.passed_over.items())), []).append(link)
    return [_words(transport, passed_over, of) for (transport, passed_over), of in sorted(alike.items())]


def _words(transport: str, passed_over: Sequence[tuple[str, str]], links: Sequence[LinkReport]) -> str:
    text = f"{len(links)} {transport}"
    if rates := [link.gb_s for link in links if link.gb_s]:
        text += f", {_range(rates)} GB/s, {_range([link.latency_ms for link in links])} ms"
    if slow := [link.slow_gb_s for link in links if link.slow_gb_s]:
        text += f", {len(slow)} slow now: {_range(slow)} GB/s"
    return "; ".join([text, *(f"not {name}: {reason}" for name, reason in passed_over)])


def _range(values: Sequence[float]) -> str:
    least, most = (f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
