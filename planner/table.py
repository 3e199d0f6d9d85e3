"""The answer of `router plan` on a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.answer import Answer, CandidateAnswer
from planner.figures import Distribution

_PLAIN_WIDTH = 150


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print it to stdout."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    verdict = answer.verdict
    console.print(Text(_question(answer)))
    console.print()
    console.print(_candidates(answer))
    console.print()
    console.print(Text(verdict.headline, "bold green" if verdict.meets else "bold yellow"))
    for line in verdict.reasons:
        console.print(Text(line))
    for remark in answer.remarks:
        console.print(Text(f"Doubtful: {remark}", "yellow"))


def _question(answer: Answer) -> str:
    asked = answer.question
    traffic, slo = asked.traffic, asked.slo
    prompt, output = traffic.prompt_tokens, traffic.output_tokens
    return (
        f"{traffic.source}: {traffic.rate:.3g} requests/s, prompts of {prompt.mean:.0f} tokens (p99 {prompt.p99:.0f},"
        f" {traffic.reused_share:.0%} reused), outputs of {output.mean:.0f} (p99 {output.p99:.0f})\n"
        f"SLOs: TTFT {_ms(slo.ttft_s)} ms and ITL {_ms(slo.itl_s)} ms, for {asked.good_share:.0%} of the requests\n"
        f"{asked.measured.model} on {asked.measured.machine}"
    )


def _candidates(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left")
    latencies = ("TTFT p50 p99, ms", "ITL p50 p99, ms")
    for title in ("fleet", "up to req/s", "good now", *latencies, "busy", "link", "held back by"):
        is_words = title in ("fleet", "held back by")
        table.add_column(title, justify="left" if is_words else "right", no_wrap=True)
    for one in sorted(answer.candidates, key=lambda one: one.num_nodes):
        table.add_row(
            one.name, _most(one), *_now(one), style="bold" if one.name == answer.verdict.best else None
        )
    return table


def _most(one: CandidateAnswer) -> str:
    if one.max_rate is None:
        return "none"
    value, low, high = one.max_rate.value, one.max_rate.low, one.max_rate.high
    return f"{'≥' if one.max_rate_is_bound else ''}{value:.3g} ({low:.3g}-{high:.3g})"


def _now(one: CandidateAnswer) -> tuple[str, ...]:
    """At the rate of the traffic."""
    point, share = one.now, one.now.good_share
    nodes = [name for name in point.busy if name not in ("link", "router")]
    link = point.busy.get("link")
    return (
        f"{share.value:.0%} ({100 * share.low:.0f}-{100 * share.high:.0f})",
        _percentiles(point.ttft_s),
        _percentiles(point.itl_s),
        " ".join(f"{name[0].upper()} {point.busy[name]:.0%}" for name in nodes),
        "" if link is None else f"{point.transfer_bytes_s / 1e6:.3g} MB/s {link:.0%}",
        point.bottleneck,
    )


def _percentiles(one: Distribution | None) -> str:
    return "" if one is None else f"{_ms(one.p50)} {_ms(one.p99)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
