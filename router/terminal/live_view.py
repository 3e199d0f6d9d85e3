"""One event of the live feed as a screen of text: what `router top` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.api.live_feed import PERCENTILES, LiveEvent, NodeNow, Sample
from router.terminal.client import printable

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_SAMPLES = 40
_PAGES_CELLS = 16
_STATE_STYLES = {"live": "green", "gone": "bold red", "refused": "bold red"}
_STATUS_STYLES = {"ok": "green", "unavailable": "bold red", "stopping": "bold red"}


def live_view(event: LiveEvent, samples: Sequence[Sample], url: str, trouble: str = "") -> RenderableType:
    """The screen. With `trouble`, what is shown is old, and it says so."""
    parts: list[RenderableType] = [_title(event, url)]
    if trouble:
        parts.append(Text(f"{printable(trouble)}; trying again, this is the last that was heard", "bold red"))
    elif event.router.reason:
        parts.append(Text(printable(event.router.reason), "yellow"))
    parts += [Text(), _traffic(samples), Text(), _latencies(event, samples), Text(), _nodes(event.nodes)]
    return Group(*parts)


def _title(event: LiveEvent, url: str) -> Text:
    router = event.router
    return Text.assemble(
        ("Baton ", "bold"),
        printable(router.model) or "no model yet",
        "  ",
        (router.status, _STATUS_STYLES.get(router.status, "yellow")),
        f"  worker {router.worker}" if router.worker is not None else "",
        (f"  up {_duration(router.uptime_s)}  {printable(url)}", "dim"),
    )


def _traffic(samples: Sequence[Sample]) -> Table:
    table = _grid()
    now = samples[-1] if samples else None
    rows: list[tuple[str, str, Sequence[float]]] = [
        ("streaming", str(now.num_running_reqs) if now else "–", [s.num_running_reqs for s in samples]),
        ("waiting", str(now.num_queue_reqs) if now else "–", [s.num_queue_reqs for s in samples]),
        ("tokens/s", _number(now.tokens_per_s) if now else "–", [s.tokens_per_s for s in samples]),
        (
            "KV transfer",
            f"{_bytes(now.decode.kv_bytes_per_s)}/s" if now else "–",
            [s.decode.kv_bytes_per_s for s in samples],
        ),
    ]
    if now and any(sample.rejected_per_s for sample in samples):
        rows.append(("429s/s", _number(now.rejected_per_s), [s.rejected_per_s for s in samples]))
    for name, value, history in rows:
        table.add_row(Text(name, "dim"), Text(value, "bold"), Text(_sparkline(history), "cyan"))
    return table


def _latencies(event: LiveEvent, samples: Sequence[Sample]) -> Table:
    table = _grid()
    over = f"last {event.router.percentile_window_s:g} s"
    table.add_row(Text(over, "dim"), *(Text(f"p{100 * share:g}", "dim") for share in PERCENTILES))
    latest = samples[-1] if samples else None
    for name, known in (
        ("first token", latest.ttft_s if latest else None),
        ("inter-token", latest.itl_s if latest else None),
    ):
        shown = [_duration(seconds) for seconds in known] if known else ["–"] * len(PERCENTILES)
        table.add_row(Text(name, "dim"), *(Text(text, "bold") for text in shown))
    return table


def _nodes(nodes: Sequence[NodeNow]) -> RenderableType:
    if not nodes:
        return Text("no nodes yet", "dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("node", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("pairing", "waiting", "transfer", "running"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV pages held/cached/free", no_wrap=True)
    for name in ("tokens/s", "KV/s", "links"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in nodes:
        table.add_row(*_node(node))
        if node.reason:
            table.add_row("", "", Text(printable(node.reason), "red" if node.state == "gone" else "yellow"))
    return table


def _node(node: NodeNow) -> list[RenderableType]:
    name = printable(node.node_id or node.address)
    state = node.state if node.loaded is None else f"{node.state} {100 * node.loaded:.0f}%"
    head: list[RenderableType] = [name, node.role, Text(state, _STATE_STYLES.get(node.state, "yellow"))]
    if not node.num_pages:
        return head
    counts = (
        node.num_bootstrapping_reqs,
        node.num_queue_reqs,
        node.num_transferring_reqs,
        node.num_running_reqs,
    )
    pages = Text.assemble(
        _pages_bar(node), f" {node.num_held_pages}/{node.num_cached_pages}/{node.num_free_pages}"
    )
    computes = node.role == "prefill"
    tokens = f"{_number(node.prompt_tokens_per_s)} in" if computes else f"{_number(node.tokens_per_s)} out"
    rates = tokens, f"{_bytes(node.kv_bytes_per_s)}/s", str(node.num_links)
    return [*head, *(str(count) for count in counts), pages, *rates]


def _pages_bar(node: NodeNow) -> Text:
    held = round(_PAGES_CELLS * node.num_held_pages / node.num_pages)
    cached = min(round(_PAGES_CELLS * node.num_cached_pages / node.num_pages), _PAGES_CELLS - held)
    free = _PAGES_CELLS - held - cached
    return Text.assemble(("█" * held, "yellow"), ("▒" * cached, "cyan"), ("·" * free, "dim"))


def _sparkline(values: Sequence[float]) -> str:
    shown = values[-_SPARK_SAMPLES:]
    highest = max(shown, default=0)
    if not highest:
        return ""
    return "".join(_BARS[round((len(_BARS) - 1) * value / highest)] for value in shown)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=12)
    for _ in PERCENTILES:
        table.add_column(justify="right", min_width=8, no_wrap=True)
    return table


def _number(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
