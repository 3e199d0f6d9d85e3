"""Draws the kept results: `python -m tests.bench.plots docs/performance` writes an SVG beside each JSON file.

The same figures give the same bytes, so that a drawing changes only with what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.suite import load
from tests.bench.table import Row

STYLE: dict[str, Any] = {
    "svg.hashsalt": "baton",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
METADATA = {"Date": None, "Creator": None}
WIDTH, HEIGHT = 7.2, 3.2
MOST_RATIO = 1.5
TARGET = {"color": "black", "linewidth": 1, "linestyle": ":"}


def draw_all(results: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """FOLDER/NAME.svg for each result that can be drawn; their paths."""
    drawn = []
    for name, draw in DRAWINGS.items():
        if name in results:
            with mpl.rc_context(STYLE):
                figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
                draw(figure, results[name]["rows"])
                path = folder / f"{name}.svg"
                figure.savefig(path, metadata=METADATA)
            drawn.append(path)
    return drawn


def decode(figure: Figure, rows: Sequence[Row]) -> None:
    """Ratios by batch: to the limit, and to reading alone."""
    for axes, key, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("ratio", "ratio_read"),
        ("limit (reading or arithmetic) / step", "reading alone / step"),
        strict=True,
    ):
        for label, of_label in _groups(rows, lambda row: f"{row['model']}, {_cores(row)}, {row['context']}"):
            _line(axes, of_label, "batch", key, label)
        axes.set(title=title, xlabel="batch", xscale="log", ylim=_from_zero(axes))
        axes.set_xticks(*2 * [sorted({row["batch"] for row in rows})], minor=False)
        axes.minorticks_off()
        axes.axhline(0.6, **TARGET)
    axes.legend(title="model, cores, context", fontsize=7)


def prefill(figure: Figure, rows: Sequence[Row]) -> None:
    """Ratios by cached and computed tokens."""
    axes = figure.subplots()
    names = [f"{row['model']}\n{_cores(row)}\n{row['cached']} + {row['length']}" for row in rows]
    _bars(axes, names, {key: _spreads(rows, key) for key in ("ratio", "ratio_all")})
    axes.axhline(0.6, **TARGET)
    axes.set(title="rate / oneDNN's GEMM rate, by cached + computed tokens", ylim=_from_zero(axes))
    axes.legend(["target", "linear layers alone", "with attention"], fontsize=7)
    axes.tick_params(axis="x", labelsize=6)


def attention(figure: Figure, rows: Sequence[Row]) -> None:
    """Decode against reading, extend against GEMM."""
    left, right = figure.subplots(1, 2)
    decode = [row for row in rows if row["bench"] == "attention_decode"]
    extend = [row for row in rows if row["bench"] == "attention_extend"]
    for axes, some, name in ((left, decode, _batch_and_context), (right, extend, _cached_and_length)):
        by_heads = {
            heads: _spreads(of, "ratio") for heads, of in _groups(some, lambda row: f"heads {row['heads']}")
        }
        _bars(axes, list(dict.fromkeys(map(name, some))), by_heads)
        axes.tick_params(axis="x", labelsize=7)
        axes.set(ylim=_from_zero(axes))
    left.axhline(0.8, **TARGET)
    left.set(title="decode: KV bytes / s over streaming read", xlabel="sequences x tokens")
    right.set(title="extend: rate over oneDNN's GEMM", xlabel="cached + computed tokens")
    right.legend(fontsize=7)


def transfer(figure: Figure, rows: Sequence[Row]) -> None:
    """Rates by size of a batch, each with its limit."""
    axes = figure.subplots()
    slots = rows[0]["slots"]
    for i, (backend, of_backend) in enumerate(
        _groups([row for row in rows if row["slots"] == slots], lambda row: str(row["backend"]))
    ):
        _line(axes, of_backend, "batch_mib", "whole_path_gb_s", backend, color=f"C{i}")
        limit = f"limit: {of_backend[0]['limit']}"
        _line(axes, of_backend, "batch_mib", "limit_gb_s", limit, color=f"C{i}", linestyle="--")
    axes.set(xscale="log", xlabel="MiB in a batch of transfers", ylabel="GB/s", ylim=(0, None))
    axes.set_xticks(*2 * [sorted({row["batch_mib"] for row in rows})])
    axes.minorticks_off()
    axes.legend()


def scheduling(figure: Figure, rows: Sequence[Row]) -> None:
    """A decision under each policy."""
    axes = figure.subplots()
    plain = [row for row in rows if row["num_waiting"] == rows[0]["num_waiting"] and row["cache_changes"]]
    plain = [row for row in plain if row["slot_free"] and not row["ignore_eos"] and not row["priority"]]
    axes.barh([row["policy"] for row in plain], [row["step_ms"] for row in plain])
    axes.invert_yaxis()
    axes.set(xlabel="ms a decision, 256 running and 1,000 waiting")


def overlap(figure: Figure, rows: Sequence[Row]) -> None:
    """The hidden share."""
    axes = figure.subplots()
    added = [f" + {row['added_ms']:g} ms" if row["added_ms"] else "" for row in rows]
    names = [
        f"{row['device']}\n{row['num_running']} x {row['forward_ms']:.3g} ms{more}".replace(", ", "\n")
        for row, more in zip(rows, added, strict=True)
    ]
    _bars(axes, names, {"hidden": _spreads(rows, "hidden")})
    axes.axhline(0.6, **TARGET)
    axes.set(title="share of the scheduler's cost that overlap hides, by running x forward")
    axes.tick_params(axis="x", labelsize=6)


def interference(figure: Figure, rows: Sequence[Row]) -> None:
    """Gaps of running streams beside a prefill."""
    axes = figure.subplots()
    keys = ("quiet_p50_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
    series = {key: _spreads(rows, key) for key in keys}
    _bars(axes, [row["fleet"] for row in rows], series)
    axes.set(title="gaps of running streams while a 2k prompt is prefilled", ylabel="ms")
    _log_y(axes)
    axes.legend(["median, no prefill", "median", "p99", "largest"], fontsize=7, loc="upper left")


def trace(figure: Figure, rows: Sequence[Row]) -> None:
    """TTFT and ITL by rate and fleet."""
    names = [f"{row['fleet']}\n{row['times_recorded_rate']:g}x rate" for row in rows]
    for axes, what in zip(figure.subplots(1, 2), ("ttft", "itl"), strict=True):
        _bars(axes, names, {key: _spreads(rows, key) for key in (f"{what}_p50_ms", f"{what}_p99_ms")})
        axes.set(title=what.upper(), ylabel="ms")
        _log_y(axes)
        axes.legend(["median", "p99"], loc="upper left")


def serving(figure: Figure, rows: Sequence[Row]) -> None:
    """Tokens a second with overlap and without."""
    axes = figure.subplots()
    rates = [row for row in rows if row["bench"] == "output_tokens_per_s"]
    _bars(
        axes,
        [f"{row['streams']} streams" for row in rates],
        {key: _spreads(rates, key) for key in ("overlap_on", "overlap_off")},
    )
    axes.set(ylabel="output tokens a second")
    axes.legend(["overlap", "no overlap"])


def router(figure: Figure, rows: Sequence[Row]) -> None:
    """Tokens a second of one core, one worker."""
    axes = figure.subplots()
    one = [row for row in rows if row["workers"] == 1]
    series = {
        label: [(row["tokens_s_one_core"], None) for row in of]
        for label, of in _groups(
            one, lambda row: f"{row['dialect']}, {row['offered_tokens_s']:,} tokens/s offered"
        )
    }
    _bars(axes, [f"{n} streams" for n in dict.fromkeys(row["streams"] for row in one)], series)
    axes.set(ylabel="tokens a second of one core")
    axes.legend(fontsize=7)


def cold_start(figure: Figure, rows: Sequence[Row]) -> None:
    """The phases after each other."""
    axes = figure.subplots()
    phases = [row for row in rows if row["bench"] == "cold_start"]
    total = next(row["seconds"] for row in phases if row["phase"] == "first answer")
    left = 0.0
    for row in phases:
        if left >= 0.999 * total or row["phase"] in ("ready", "first answer"):
            break
        axes.barh(["router"], [row["seconds"]], left=left, label=f"{row['phase']} {row['seconds']:g} s")
        left += row["seconds"]
    axes.set(xlabel="seconds from the command to the first answer")
    axes.legend(ncols=3, fontsize=7, loc="upper center")
    axes.margins(y=1.0)


def memory(figure: Figure, rows: Sequence[Row]) -> None:
    """What a node takes, in three parts."""
    axes = figure.subplots()
    names = [f"{row['model']}\n{row['node']}\n{row['after']}" for row in rows]
    bottom = [0.0] * len(rows)
    for key in ("weights_mib", "kv_mib", "beyond_mib"):
        axes.bar(names, [row[key] for row in rows], bottom=bottom, label=key.removesuffix("_mib"))
        bottom = [b + row[key] for b, row in zip(bottom, rows, strict=True)]
    axes.tick_params(axis="x", labelsize=5)
    axes.set(ylabel="peak, MiB")
    axes.legend()


def peers(figure: Figure, rows: Sequence[Row]) -> None:
    """Speed by workload and engine over that of the best peer, and memory."""
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 1))
    timed = [row for row in rows if row["bench"] == "peers" and "against_best" in row]
    by_engine = {
        name: _spreads(of, "against_best") for name, of in _groups(timed, lambda r: str(r["engine"]))
    }
    _bars(speed, list(dict.fromkeys(row["workload"] for row in timed)), by_engine)
    speed.axhline(1.2, **TARGET)
    speed.set(title="speed over the best peer's")
    speed.legend(fontsize=7)
    kept = [row for row in rows if row["bench"] == "peers_memory"]
    memory.bar([row["engine"] for row in kept], [row["peak_mib"] for row in kept], color="C7")
    memory.tick_params(axis="x", labelrotation=90, labelsize=7)
    memory.set(title="peak memory, MiB")


DRAWINGS: dict[str, Callable[[Figure, Sequence[Row]], None]] = {
    "decode": decode,
    "prefill": prefill,
    "attention": attention,
    "transfer": transfer,
    "scheduling": scheduling,
    "overlap": overlap,
    "interference": interference,
    "trace": trace,
    "serving": serving,
    "router": router,
    "cold_start": cold_start,
    "memory": memory,
    "peers_llama_160m": peers,
    "peers_qwen3_0_6b": peers,
}

Spreads = list[tuple[float, Sequence[float] | None]]
"""(value, its spread if there is one)"""


def _spreads(rows: Sequence[Row], key: str) -> Spreads:
    return [(row[key], row.get(f"{key}_spread")) for row in rows]


def _errors(spreads: Spreads) -> list[list[float]]:
    """How far each value's spread reaches down and up."""
    reach = [(value - least, most - value) for value, (least, most) in ((v, s or (v, v)) for v, s in spreads)]
    return [[max(down, 0.0) for down, _ in reach], [max(up, 0.0) for _, up in reach]]


def _bars(axes: Axes, names: Sequence[str], series: Mapping[str, Spreads]) -> None:
    """Groups of bars, one of each series for each name, with spreads."""
    width = 0.8 / len(series)
    for i, (label, spreads) in enumerate(series.items()):
        places = [at + (i - (len(series) - 1) / 2) * width for at in range(len(spreads))]
        values = [value for value, _ in spreads]
        axes.bar(places, values, width, yerr=_errors(spreads), label=label, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")


def _from_zero(axes: Axes) -> tuple[float, float]:
    """Limits of a ratio's axis; what is far above 1 can only be noise, and would hide the rest."""
    return 0.0, min(axes.get_ylim()[1], MOST_RATIO)


def _log_y(axes: Axes) -> None:
    """A logarithmic axis with plain numbers, and room for a legend."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    least, most = axes.get_ylim()
    axes.set_ylim(least, 4 * most)


def _line(axes: Axes, rows: Sequence[Row], x: str, y: str, label: str, **more: Any) -> None:
    spreads = _spreads(rows, y)
    values = [value for value, _ in spreads]
    axes.errorbar(
        [row[x] for row in rows], values, _errors(spreads), label=label, marker="o", markersize=3, **more
    )


def _groups(rows: Sequence[Row], name: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    """Rows by name, in the order in which names first come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return list(groups.items())


def _cores(row: Row) -> str:
    return f"{row['cores']} core{'s' if row['cores'] > 1 else ''}"


def _batch_and_context(row: Row) -> str:
    return f"{row['batch']} x {row['context']}"


def _cached_and_length(row: Row) -> str:
    return f"{row['cached']} + {row['length']}"


if __name__ == "__main__":
    for path in draw_all(load(Path(sys.argv[1])), Path(sys.argv[1])):
        print(path)
