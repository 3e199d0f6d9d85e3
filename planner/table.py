"""The answer of `router plan` on a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.answer import Answer, CandidateAnswer, Estimate
from planner.figures import Distribution

_PLAIN_WIDTH = 150
_LATENCIES = ("TTFT p50 p99, ms", "ITL p50 p99, ms")


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print it to stdout."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(_question(answer))
    console.print()
    console.print(_comparison(answer) if answer.base is not None else _candidates(answer))
    console.print()
    console.print(Text(answer.verdict.headline, "bold green" if answer.verdict.meets else "bold yellow"))
    for reason in answer.verdict.reasons:
        console.print(Text(reason))
    if answer.thresholds:
        console.print()
        for threshold in answer.thresholds:
            console.print(Text(threshold.words))
    if answer.sensitivity:
        console.print()
        console.print(_sensitivity(answer))
    for remark in answer.remarks:
        console.print(Text(f"Doubtful: {remark}", "yellow"))
    effort = answer.effort
    console.print(
        Text(
            f"{effort.num_simulations} simulations of {effort.num_simulated_reqs} requests took {effort.seconds:.0f} "
            f"s, {1000 * effort.cpu_s / effort.num_simulated_reqs:.2g} ms of CPU a request.",
            "dim",
        )
    )


def _question(answer: Answer) -> Text:
    asked = answer.question
    traffic, slo = asked.traffic, asked.slo
    prompt, output = traffic.prompt_tokens, traffic.output_tokens
    machines = ", ".join(
        (f"{machine.role}: " if machine.role != "both" else "")
        + f"{machine.measured.model} on {machine.measured.machine}"
        for machine in asked.machines
    )
    lines = (
        f"{traffic.source}: {traffic.rate:.3g} requests/s, prompts of {prompt.mean:.0f} tokens (p99 {prompt.p99:.0f},"
        f" {traffic.reused_share:.0%} reused), outputs of {output.mean:.0f} (p99 {output.p99:.0f})",
        f"SLOs: TTFT {_ms(slo.ttft_s)} ms and ITL {_ms(slo.itl_s)} ms, for {asked.good_share:.0%} of the requests",
        machines,
    )
    return Text("\n".join(lines))


def _candidates(answer: Answer) -> Table:
    has_prices = any(one.price is not None for one in answer.candidates)
    table = _table("fleet", "price/h", "up to req/s", "req/price", "good now", *_LATENCIES, "busy",
                   "link", "held back by", skip=() if has_prices else ("price/h", "req/price"))  # fmt: skip
    for num_nodes in sorted({one.num_nodes for one in answer.candidates}):
        for one in (one for one in answer.candidates if one.num_nodes == num_nodes):
            row = [
                one.name + (" *" if one.is_screened else ""),
                f"{one.price:g}" if one.price is not None else "",
                _most(one),
                f"{one.goodput_a_price:.0f}" if one.goodput_a_price is not None else "",
                *_now(one),
            ]
            kept = row if has_prices else [row[0], row[2], *row[4:]]
            table.add_row(*kept, style=_style(answer, one))
        table.add_section()
    if any(one.is_screened for one in answer.candidates):
        table.caption = (
            "* from the screen, a part of the traffic: not to be compared with lines without a star"
        )
    return table


def _comparison(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for flag in answer.candidates[0].settings:
        table.add_column(flag.replace("-", " "))
    for title in ("good now", *_LATENCIES, "goodput, req/s", "mean TTFT, ms", "mean ITL, ms"):
        table.add_column(title, justify="right")
    table.add_column("from the base", no_wrap=True)
    for one in answer.candidates:
        differs = one.difference
        differences = ("", "", "", "base")
        if differs is not None:
            differences = (
                _signed(differs.goodput, 1),
                _signed(differs.ttft_mean_s, 1000),
                _signed(differs.itl_mean_s, 1000),
                "differs" if differs.is_more_than_noise else "noise",
            )
        table.add_row(*one.settings.values(), *_now(one)[:3], *differences, style=_style(answer, one))
    return table


def _table(*titles: str, skip: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left")
    for at, title in enumerate(title for title in titles if title not in skip):
        table.add_column(
            title, justify="left" if at == 0 or title in ("", "held back by") else "right", no_wrap=True
        )
    return table


def _style(answer: Answer, one: CandidateAnswer) -> str | None:
    return "bold" if one.name == answer.verdict.best else None


def _most(one: CandidateAnswer) -> str:
    if one.max_rate is None:
        return "none"
    value, low, high = one.max_rate.value, one.max_rate.low, one.max_rate.high
    return f"{'≥' if one.max_rate_is_bound else ''}{value:.3g} ({low:.3g}-{high:.3g})"


def _now(one: CandidateAnswer) -> tuple[str, ...]:
    """At the rate of the traffic."""
    point = one.now
    share = point.good_share
    busy = " ".join(f"{use.role[0].upper()} {use.busy_share:.0%}" for use in point.use)
    link = (
        ""
        if point.transfer is None
        else f"{point.transfer.bytes_s / 1e6:.3g} MB/s {point.transfer.link_busy_share:.0%}"
    )
    return (
        f"{share.value:.0%} ({100 * share.low:.0f}-{100 * share.high:.0f})",
        _percentiles(point.ttft_s),
        _percentiles(point.itl_s),
        busy,
        link,
        point.bottleneck,
    )


def _percentiles(one: Distribution | None) -> str:
    return "" if one is None else f"{_ms(one.p50)} {_ms(one.p99)}"


def _sensitivity(answer: Answer) -> Table:
    table = _table("if", "best", f"its goodput and that of {answer.verdict.best}, req/s", "", skip=())
    for one in answer.sensitivity:
        table.add_row(
            f"{one.what} {one.factor - 1:+.0%}",
            one.best + (" (another)" if one.changes else ""),
            f"{one.goodput_of_best:.3g}, {one.goodput_of_verdict:.3g}",
            "the SLOs are met" if one.meets else "the SLOs are missed",
        )
    return table


def _signed(one: Estimate, times: float) -> str:
    return f"{times * one.value:+.3g} ({times * one.low:+.3g} to {times * one.high:+.3g})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
