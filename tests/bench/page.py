"""Writes the tables of the kept results in docs/performance/.

`python -m tests.bench.page` fills in the README and docs/performance.md. Only what stands between `<!-- NAME -->` and
`<!-- /NAME -->` is generated. NAME is a bench, for its table; `targets` or `machine`; `peers`, for Baton beside other
engines; `speed`, for the tables of the README; or a folder of docs/performance/ with the results of another kind of
machine, for that machine. The targets that were measured on it have a column of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.bench.suite import load
from tests.bench.table import Row
from tests.bench.targets import Results, targets_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
PAGES = (PAGE, ROOT / "README.md")
WORKLOADS = {
    "single": "1 prompt of 512 tokens, 128 out",
    "batch": "32 prompts of 256 tokens, 128 out each",
    "prompt": "1 prompt of 2048 tokens, 1 out",
    "shared": "16 prompts that share 1024 of 1088 tokens, 32 out each",
}
ENGINES = {
    "baton-0P1D": "Baton, one node",
    "baton-1P1D": "Baton, 1P1D",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "llamacpp-k": "llama.cpp, Q4_K_M",
}
WEIGHTS = {
    "peers_qwen3_0_6b": "in bf16",
    "peers_qwen3_0_6b_int8": "with weights of 8 bits (W8A8; OpenVINO INT8, llama.cpp Q8_0)",
    "peers_qwen3_0_6b_int4": "with weights of 4 bits in groups of 128 (W4A16; OpenVINO INT4, llama.cpp Q4_0)",
}
"""The results that the README's tables show."""
BITS = {"int8": "8 bits", "int4": "4 bits", "mxfp4": "MXFP4"}
"""Weights by the end of a result's name. Other results are in bf16."""
COLUMNS = {
    "overlap": "device num_running added_ms forward_ms cost_ms hidden speedup",
    "interference": "fleet quiet_p50_ms itl_p50_ms itl_p99_ms itl_max_ms ttft_ms",
    "failover": (
        "what times p50_ms p99_ms limit_ms "
        "context moves pause_p50_ms step_ms pause_steps_p50 pause_steps_p99 quiet_steps_p50 quiet_steps_p99"
    ),
}
"""What the page's tables show of the rows; the JSON files have the rest."""
PIVOTS = {
    "decode": ("model cores context", "batch", "step_ms ratio ratio_read"),
    "prefill": ("model cores length", "cached", "tokens_s ratio ratio_all"),
    "attention": ("batch context", "heads", "call_us ratio"),
    "transfer": ("backend", "batch_mib", "whole_path_gb_s ratio"),
    "scheduling": ("num_waiting", "policy", "step_ms"),
    "router": ("workers dialect offered_tokens_s", "streams", "tokens_s_one_core tokens_an_event"),
}
"""Of benches with many rows: the columns that name a row, the one whose values head the others, and what a cell has,
all but the first of them in brackets."""
ROWS: Mapping[str, Callable[[Row], bool]] = {
    "prefill": lambda row: row["length"] != 1024 and row["cached"] in (0, 1536, 3584),
    "attention": lambda row: row.get("batch") != 8,
    "transfer": lambda row: row["slots"] == "4 x 4 MiB",
    "scheduling": lambda row: (
        (row["num_waiting"], row["slot_free"], row["cache_changes"]) == (1000, True, True)
        and not (row["ignore_eos"] or row["priority"])
    ),
    "overlap": lambda row: row["cost_ms"] >= 0.05 * row["wall_off_ms"],  # as its target
    "failover": lambda row: row["bench"] in ("detection", "moved_stream"),
}
"""Which rows a table shows, if not all."""


def main() -> None:
    """Write the pages anew."""
    folder = PAGE.with_suffix("")
    results = load(folder)
    others = {path.name: load(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    for page in PAGES:
        page.write_text(filled(page.read_text(), results, others))


def filled(page: str, results: Results, others: Mapping[str, Results] = MappingProxyType({})) -> str:
    """`page` with every generated part replaced. `others` has the results of other kinds of machines by folder.

    A part without results is "Not measured."; one of a bench that no page shows raises KeyError.
    """

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name in others:
            text = _machine(others[name])
        else:
            text = targets_table(results, others) if name == "targets" else _generated(name, results)
        return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", part, page, flags=re.DOTALL)


def _generated(name: str, results: Results) -> str:
    match name:
        case "speed":
            return _speed(results)
        case "machine":
            return _machine(results)
        case "peers":
            return _peers(results)
    if name not in results:
        return "Not measured."
    if name == "planner":
        lines = _planner(results[name])
    else:
        rows = [row for row in results[name]["rows"] if name not in ROWS or ROWS[name](row)]
        lines = _pivot(rows, *PIVOTS[name]) if name in PIVOTS else _tables(rows, COLUMNS[name].split())
    return "\n".join(lines)


ERRORS = {
    "goodput": "goodput",
    "ttft_mean_ms": "TTFT mean",
    "ttft_p99_ms": "TTFT p99",
    "itl_mean_ms": "ITL mean",
    "itl_p99_ms": "ITL p99",
}


def _planner(result: Mapping[str, Any]) -> list[str]:
    """Predictions that missed, with how far their two rounds differ, and the range of those that hit."""
    rows = [row for row in result["rows"] if row["bench"] == "error"]
    hits = [row for row in rows if row["hit"]]
    head = [f"{len(hits)} of {len(rows)} hit", "kernels", "fleet, workload, rate", *ERRORS.values()]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for row in rows:
        if not row["hit"]:
            errors = [
                f"{100 * row[f'{name}_error']:+.0f} ({100 * row[f'{name}_differ']:.0f})" for name in ERRORS
            ]
            what = f"{row['fleet']}, {row['part'].split()[0]}, {row['rate']:g}x"
            lines.append(f"| {' | '.join(['**missed**', row['kernels'], what, *errors])} |")
    for kernels in dict.fromkeys(row["kernels"] for row in hits):
        group = [row for row in hits if row["kernels"] == kernels]
        errors = [_percents([row[f"{name}_error"] for row in group]) for name in ERRORS]
        lines.append(f"| {' | '.join(['hit', kernels, f'{len(group)} of them', *errors])} |")
    return lines


def _percents(shares: Sequence[float]) -> str:
    """The least and the most, if they differ."""
    ends = (f"{100 * end:+.0f}" for end in (min(shares), max(shares)))
    return " to ".join(dict.fromkeys(ends))


def _peers(results: Results) -> str:
    """A row for each model and fleet of Baton, in brackets the best other engine of each column."""
    head = ["model, weights", "fleet", *WORKLOADS, "of_read_limit", "peak_mib"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for name, result in results.items():
        if not name.startswith("peers_"):
            continue
        rows = result["rows"]
        what = f"{rows[0]['model']}, {BITS.get(name.rpartition('_')[2], 'bf16')}"
        for fleet in ("baton-0P1D", "baton-1P1D"):
            of = {row["workload"]: row for row in rows if row["engine"] == fleet and "seconds" in row}
            if not of:
                continue
            cells = [
                "{seconds:g} ({against_best:g} {best_peer})".format_map(of[work]) if work in of else "–"
                for work in WORKLOADS
            ]
            cells += [_beside(rows, fleet, "of_read_limit", max), _beside(rows, fleet, "peak_mib", min)]
            lines.append(f"| {' | '.join([what, fleet[6:], *cells])} |")
    return "\n".join(lines)


def _beside(rows: Sequence[Row], fleet: str, column: str, best: Callable[..., str]) -> str:
    """A figure of `fleet`, and in brackets the best of the other engines'."""
    of = {row["engine"]: row[column] for row in rows if column in row}
    other = best((engine for engine in of if not engine.startswith("baton")), key=of.__getitem__)
    return f"{of[fleet]:g} ({of[other]:g} {other})"


def _speed(results: Results) -> str:
    """Seconds of each workload, and how many times as fast that is as the best other engine of the same rounds."""
    streams = results["interference"]
    itl = {row["fleet"]: f"{row['itl_p99_ms']:g} ms" for row in streams["rows"]}
    beside = (
        f"Llama-160M on {streams['machine']['cpu']}: p99 between tokens of 8 streams, "
        "beside prompts of 2048 tokens"
    )
    lines: list[str] = []
    for name, what in WEIGHTS.items():
        if name not in results:
            continue
        table = _speed_table(results[name])
        if name == "peers_qwen3_0_6b":
            table.append([beside, itl["0P1D"], itl["1P1D"], *["–"] * (len(table[0]) - 3)])
        about = results[name]["machine"]
        machine = f"{about['cores']} cores of {about['cpu']} ({', '.join(about['cpu_flags'][1:])})"
        lines += [
            "",
            f"{what[0].upper()}{what[1:]}, on {machine}:",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
        ]
    return "\n".join(lines[1:])


def _speed_table(peers: Mapping[str, Any]) -> list[list[str]]:
    by_cell = {(row["workload"], row["engine"]): row for row in peers["rows"] if "seconds" in row}
    engines = [engine for engine in ENGINES if any(engine == measured for _, measured in by_cell)]

    def cell(workload: str, engine: str) -> str:
        row = by_cell[workload, engine]
        ratio = f" ({row['against_best']:g}x)" if engine.startswith("baton") else ""
        return f"{row['seconds']:g} s{ratio}"

    head = [["", *(ENGINES[engine] for engine in engines)], ["---"] * (1 + len(engines))]
    return head + [[what, *(cell(name, engine) for engine in engines)] for name, what in WORKLOADS.items()]


def _machine(results: Results) -> str:
    """A line for each kind of machine, with the load of the minute before each of its benches."""
    keys = ("cpu", "cpu_flags", "cores", "last_level_cache_mib", "memory_gib", "torch", "python")
    kinds = {}
    for name, result in results.items():
        about = {key: result["machine"][key] for key in keys}
        kinds.setdefault(repr(about), (about, []))[1].append(name)
    lines = []
    for about, names in kinds.values():
        days = sorted({results[name]["machine"]["date"].split()[0] for name in names})
        loads = ", ".join(f"{name} {results[name]['machine']['load_before']:g}" for name in names)
        lines.append(
            f"{about['cpu']} ({', '.join(about['cpu_flags'])}), {about['cores']} cores, "
            f"{about['last_level_cache_mib']} MiB of last-level cache, {about['memory_gib']:g} GiB of memory; "
            f"torch {about['torch']}, Python {about['python']}; "
            f"{' to '.join(days[:1] + days[1:][-1:])}. Loads: {loads}."
        )
    return "\n\n".join(lines)


def _tables(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Markdown: a table for each run of rows with the same columns."""
    lines: list[str] = []
    shown: list[str] = []
    for row in rows:
        has = [column for column in columns if column in row]
        if has != shown:
            lines += ["", f"| {' | '.join(has)} |", f"| {' | '.join('---' for _ in has)} |"]
            shown = has
        lines.append(f"| {' | '.join(_cell(row, column) for column in has)} |")
    return lines[1:]


def _pivot(rows: Sequence[Row], index: str, across: str, cell: str) -> list[str]:
    """Markdown: a row for each value of the columns `index`, a column for each of `across`; see PIVOTS."""
    names, shown = index.split(), cell.split()
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if all(column in row for column in (*names, across, *shown)):
            cells = table.setdefault(tuple(_cell(row, name) for name in names), {})
            first, *more = (_cell(row, column) for column in shown)
            cells[f"{across} {_cell(row, across)}"] = f"{first} ({', '.join(more)})" if more else first
    heads = list(dict.fromkeys(value for cells in table.values() for value in cells))
    lines = [f"| {' | '.join((*names, *heads))} |", f"| {' | '.join('---' for _ in (*names, *heads))} |"]
    for key, cells in table.items():
        lines.append(f"| {' | '.join((*key, *(cells.get(head, '–') for head in heads)))} |")
    return lines


def _cell(row: Row, column: str) -> str:
    """A figure; its spread is in the JSON file."""
    value = row[column]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
