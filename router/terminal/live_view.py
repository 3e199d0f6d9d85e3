"""One event of the live feed as a screen of text: what `router top` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from router.api.live_feed import PERCENTILES, LiveEvent, NodeNow, Sample
from router.terminal.client import printable

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_SAMPLES = 40
_PAGES_CELLS = 16
_UNLIMITED = 10_000
_STATE_STYLES = {"live": "green", "gone": "bold red", "refused": "bold red"}
_STATUS_STYLES = {"ok": "green", "unavailable": "bold red", "stopping": "bold red"}


def live_view(event: LiveEvent, samples: Sequence[Sample], url: str, trouble: str = "") -> RenderableType:
    """The screen. With `trouble`, what is shown is old, and it says so."""
    parts: list[RenderableType] = [_title(event, url)]
    if trouble:
        parts.append(Text(f"{printable(trouble)}; trying again, this is the last that was heard", "bold red"))
    elif event.router.reason:
        parts.append(Text(printable(event.router.reason), "yellow"))
    parts += [Text(), _traffic(samples), Text(), _latencies(event, samples), Text(), _Nodes(event.nodes)]
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


class _Nodes:
    """A table of the nodes with as many columns as there is room for; their names and states are always whole."""

    def __init__(self, nodes: Sequence[NodeNow]) -> None:
        self._nodes = nodes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's console protocol."""
        if not self._nodes:
            yield Text("no nodes yet", "dim")
            return
        left_out: set[str] = set()
        table = self._table(left_out)
        for title in _LEAST_FIRST:
            if console.measure(table, options=options.update(width=_UNLIMITED)).maximum <= options.max_width:
                break
            left_out.add(title)
            table = self._table(left_out)
        yield table
        for node in self._nodes:
            if node.reason:
                style = "red" if node.state == "gone" else "yellow"
                yield Text(f"{_name(node)}: {printable(node.reason)}", style)

    def _table(self, left_out: set[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("node", overflow="fold")
        shown = [column for column in _COLUMNS if column.title not in left_out]
        for column in shown:
            table.add_column(column.title, justify=column.justify, no_wrap=True)
        for node in self._nodes:
            table.add_row(_name(node), *(column.cell(node) for column in shown))
        return table


def _name(node: NodeNow) -> str:
    return printable(node.node_id or node.address)


def _state(node: NodeNow) -> Text:
    state = node.state if node.loaded is None else f"{node.state} {100 * node.loaded:.0f}%"
    return Text(state, _STATE_STYLES.get(node.state, "yellow"))


def _tokens(node: NodeNow) -> str:
    if node.role == "prefill":
        return f"{_number(node.prompt_tokens_per_s)} in"
    return f"{_number(node.tokens_per_s)} out"


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


@dataclass(frozen=True)
class _Column:
    """What it shows of a node; `of_known` is empty for a node that has not said yet how it is."""

    title: str
    of_known: Callable[[NodeNow], str | Text]
    justify: Literal["left", "right"] = "right"
    always: bool = False

    def cell(self, node: NodeNow) -> str | Text:
        """Its text for a node."""
        return self.of_known(node) if self.always or node.num_pages else ""


def _links(node: NodeNow) -> str:
    return " ".join(f"{number} {transport}" for transport, number in node.links.items()) or str(
        node.num_links
    )


_COLUMNS = (
    _Column("role", lambda node: node.role, "left", always=True),
    _Column("state", _state, "left", always=True),
    _Column("pairing", lambda node: str(node.num_bootstrapping_reqs)),
    _Column("waiting", lambda node: str(node.num_queue_reqs)),
    _Column("transfer", lambda node: str(node.num_transferring_reqs)),
    _Column("running", lambda node: str(node.num_running_reqs)),
    _Column("KV pages", _pages_bar, "left"),
    _Column(
        "held/cached/free",
        lambda node: f"{node.num_held_pages}/{node.num_cached_pages}/{node.num_free_pages}",
        "left",
    ),
    _Column("tokens/s", _tokens),
    _Column("KV/s", lambda node: f"{_bytes(node.kv_bytes_per_s)}/s"),
    _Column("links", _links),
)
_LEAST_FIRST = (
    "KV pages", "links", "pairing", "KV/s", "transfer", "held/cached/free", "tokens/s", "waiting", "running", "role",
)  # fmt: skip
"""What a narrow terminal goes without, in this order. Never the names of the nodes and their states."""
