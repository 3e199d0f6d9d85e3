"""Writes the tables of the kept results in docs/performance/.

`python -m tests.bench.page` fills in the README and docs/performance.md. Only what stands between `<!-- NAME -->` and
`<!-- /NAME -->` is generated. NAME is a bench, for its tables; `targets` or `machine`; `peers`, for the table of all
engines; `speed`, for the table of the README; or a folder of docs/performance/ with the results of another kind of
machine, for that machine and the targets that were measured on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.bench.suite import load
from tests.bench.table import Row
from tests.bench.targets import targets_table

Results = Mapping[str, Mapping[str, Any]]
"""By the name of the bench."""

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
    "prefill": "model cores cached length tokens_s ratio ratio_all",
    "scheduling": "policy num_waiting slot_free ignore_eos priority cache_changes step_ms",
    "overlap": "device num_running added_ms forward_ms cost_ms hidden speedup",
    "interference": "fleet gaps quiet_p50_ms itl_p50_ms itl_p99_ms itl_max_ms ttft_ms p99_ratio",
    "trace": "fleet times_recorded_rate ttft_p50_ms ttft_p99_ms itl_p50_ms itl_p99_ms goodput",
    "serving": "streams overlap_on overlap_off cold_ms cached_ms handoff_ms ratio",
    "failover": (
        "what prompt_cached times streams context moves p50_ms p99_ms limit_ms pause_p50_ms "
        "pause_p99_ms prefill_p50_ms prefill_p99_ms ratio_p50 ratio_p99 step_ms pause_steps_p50 "
        "pause_steps_p99 quiet_steps_p50 quiet_steps_p99 drain_s ratio "
        "longest_pause_p50_ms longest_pause_p99_ms wrong"
    ),
    "cold_start": "command phase seconds",
}
"""What the page's tables show of the rows; the JSON files have the rest."""
PIVOTS = {
    "decode": (("model cores context", "batch", "step_ms ratio ratio_read"),),
    "attention": (
        ("batch context", "heads", "call_us ratio"),
        ("cached length", "heads", "call_ms ratio"),
    ),
    "transfer": (("backend slots", "batch_mib", "whole_path_gb_s ratio"),),
    "sockets": (("transport", "batch_mib", "whole_path_gb_s ratio"),),
    "memory": (("model node", "after", "beyond_mib"),),
    "router": (("workers dialect streams", "offered_tokens_s", "tokens_s_one_core tokens_an_event"),),
}
"""Of benches with many rows, for each table: the columns that name a row, the one whose values head the others, and
what a cell has, all but the first of them in brackets."""


def main() -> None:
    """Write the pages anew."""
    folder = PAGE.with_suffix("")
    results = load(folder)
    others = {path.name: load(path) for path in folder.iterdir() if path.is_dir()}
    for page in PAGES:
        page.write_text(filled(page.read_text(), results, others))


def filled(page: str, results: Results, others: Mapping[str, Results] = MappingProxyType({})) -> str:
    """`page` with every generated part replaced. `others` has the results of other kinds of machines by folder.

    Raises KeyError for a part that names neither a bench nor a folder.
    """

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name in others:
            text = f"{_machine(others[name])}\n\n{targets_table(others[name], measured_only=True)}"
        else:
            text = _generated(name, results)
        return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", part, page, flags=re.DOTALL)


def _generated(name: str, results: Results) -> str:
    match name:
        case "targets":
            return targets_table(results)
        case "speed":
            return _speed(results)
        case "machine":
            return _machine(results)
        case "peers":
            return _peers(results)
    if name not in results:
        return "Not measured."
    result = results[name]
    about = result["machine"]
    if name == "planner":
        tables = _planner(result)
    elif name in PIVOTS:
        tables = [line for pivot in PIVOTS[name] for line in ("", *_pivot(result["rows"], *pivot))][1:]
    else:
        tables = _tables(result["rows"], COLUMNS[name].split())
    lines = [f"{about['date'].split()[0]}, load {about['load_before']:g}.", "", *tables]
    return "\n".join(lines).rstrip()


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
    head = ["", "kernels", "fleet, workload, rate", *ERRORS.values(), "CPU"]
    lines = [
        f"{len(hits)} of {len(rows)} hit.",
        "",
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
    ]
    for row in rows:
        if not row["hit"]:
            errors = [
                f"{100 * row[f'{name}_error']:+.0f} ({100 * row[f'{name}_differ']:.0f})" for name in ERRORS
            ]
            what = f"{row['fleet']}, {row['part'].split()[0]}, {row['rate']:g}x"
            shown = ["**missed**", row["kernels"], what, *errors, f"{100 * row['cpu_share']:.0f} %"]
            lines.append(f"| {' | '.join(shown)} |")
    for kernels in dict.fromkeys(row["kernels"] for row in hits):
        group = [row for row in hits if row["kernels"] == kernels]
        errors = [_percents([row[f"{name}_error"] for row in group], "+") for name in ERRORS]
        cpu = _percents([row["cpu_share"] for row in group], "")
        shown = ["hit", kernels, f"{len(group)} of them", *errors, f"{cpu} %"]
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def _percents(shares: Sequence[float], sign: str) -> str:
    """The least and the most, if they differ."""
    ends = (f"{100 * end:{sign}.0f}" for end in (min(shares), max(shares)))
    return " to ".join(dict.fromkeys(ends))


def _peers(results: Results) -> str:
    """A row for each engine: seconds of each workload and what it has against the best other engine, and memory."""
    head = ["model, weights", "engine", *WORKLOADS, "of_read_limit", "peak_mib"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for name, result in results.items():
        if not name.startswith("peers_"):
            continue
        of = {(row["engine"], row.get("workload")): row for row in result["rows"] if "reason" not in row}
        model, load = result["rows"][0]["model"], result["machine"]["load_before"]
        what = f"{model}, {BITS.get(name.rpartition('_')[2], 'bf16')} (load {load:g})"
        for engine in dict.fromkeys(engine for engine, _ in of):
            cells = [
                f"{of[engine, work]['seconds']:g} ({of[engine, work]['against_best']:g})"
                if (engine, work) in of
                else "–"
                for work in WORKLOADS
            ]
            single, memory = of[engine, "single"], of[engine, None]
            shown = [what, engine, *cells, f"{single['of_read_limit']:g}", f"{memory['peak_mib']:g}"]
            lines.append(f"| {' | '.join(shown)} |")
            what = ""
    return "\n".join(lines)


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
    """What is the same for all results, or a line for each kind of machine."""
    keys = ("cpu", "cpu_flags", "cores", "last_level_cache_mib", "memory_gib", "torch", "python")
    kinds = {}
    for name, result in results.items():
        about = {key: result["machine"][key] for key in keys}
        kinds.setdefault(repr(about), (about, []))[1].append(name)
    lines = []
    for about, names in kinds.values():
        which = "" if len(kinds) == 1 else f"{', '.join(names)}: "
        lines.append(
            f"{which}{about['cpu']} ({', '.join(about['cpu_flags'])}), {about['cores']} cores, "
            f"{about['last_level_cache_mib']} MiB of last-level cache, {about['memory_gib']:g} GiB of memory; "
            f"torch {about['torch']}, Python {about['python']}."
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
