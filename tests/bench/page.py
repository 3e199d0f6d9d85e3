"""Words and draws the kept results in docs/performance/: `python -m tests.bench.page` fills in the README and
docs/performance.md.

What people write there stays. What stands between `<!-- NAME -->` and `<!-- /NAME -->` is generated: the drawing and
the table of the bench NAME; `targets`, or only their `headlines`; and `machine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.plots import draw_all
from tests.bench.suite import load
from tests.bench.table import Row
from tests.bench.targets import targets_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
PAGES = (PAGE, ROOT / "README.md")
PEERS = (
    "workload",
    "engine",
    "seconds",
    "ttft_ms",
    "tpot_ms",
    "of_read_limit",
    "against_best",
    "first_tokens_agree",
    "version",
    "load_s",
    "kv_mib",
    "weights_mib",
    "peak_mib",
    "proportional_mib",
)
COLUMNS: dict[str, tuple[str, ...]] = {
    "decode": (
        "model",
        "cores",
        "kernels",
        "batch",
        "context",
        "step_ms",
        "tokens_s",
        "bound_by",
        "ratio",
        "ratio_read",
    ),
    "prefill": (
        "model",
        "cores",
        "kernels",
        "cached",
        "length",
        "prefill_ms",
        "tokens_s",
        "gemm_gflop_s",
        "ratio",
        "ratio_all",
    ),
    "attention": (
        "heads",
        "batch",
        "context",
        "cached",
        "length",
        "call_us",
        "call_ms",
        "read_gb_s",
        "gemm_gflop_s",
        "ratio",
        "speedup",
    ),
    "transfer": ("backend", "slots", "batch_mib", "whole_path_gb_s", "limit", "limit_gb_s", "ratio"),
    "scheduling": (
        "policy",
        "num_waiting",
        "slot_free",
        "ignore_eos",
        "priority",
        "cache_changes",
        "step_ms",
        "step_p99_ms",
    ),
    "overlap": (
        "device",
        "num_running",
        "added_ms",
        "forward_ms",
        "cost_ms",
        "hidden",
        "tokens_s_off",
        "tokens_s_on",
        "speedup",
    ),
    "interference": (
        "fleet",
        "gaps",
        "quiet_p50_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "itl_max_ms",
        "ttft_ms",
        "p99_ratio",
    ),
    "trace": (
        "fleet",
        "times_recorded_rate",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "output_tokens_s",
        "goodput",
    ),
    "serving": ("streams", "overlap_on", "overlap_off", "cold_ms", "cached_ms", "handoff_ms", "ratio"),
    "router": (
        "workers",
        "dialect",
        "streams",
        "offered_tokens_s",
        "tokens_s",
        "tokens_an_event",
        "tokens_s_one_core",
    ),
    "cold_start": ("command", "phase", "seconds"),
    "peers_llama_160m": PEERS,
    "peers_qwen3_0_6b": PEERS,
    "memory": ("model", "node", "after", "weights_mib", "kv_mib", "peak_mib", "beyond_mib"),
}
"""What the page's tables show of the rows; the JSON files have the rest."""


def main() -> None:
    """Draw, and write the pages anew."""
    folder = PAGE.with_suffix("")
    results = load(folder)
    draw_all(results, folder)
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))


def filled(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """`page` with every generated part replaced. Raises KeyError for a part that names no bench."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n\n{_generated(name, results)}\n\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", part, page, flags=re.DOTALL)


def _generated(name: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    match name:
        case "targets":
            return targets_table(results)
        case "headlines":
            return targets_table(results, headlines=True)
        case "machine":
            return _machine(results)
    columns = COLUMNS[name]
    if name not in results:
        return "Not measured."
    result = results[name]
    about = result["machine"]
    lines = [
        f"![{name}](performance/{name}.svg)",
        "",
        f"{about['date']}, {result['seconds']} s, load before it {about['load_before']:g}.",
        "",
        *_tables(result["rows"], columns),
    ]
    return "\n".join(lines)


def _machine(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What is the same for all results, or a line for each kind of machine."""
    keys = ("cpu", "cpu_flags", "cores", "last_level_cache_mib", "memory_gib", "kernel", "torch", "python")
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
            f"Linux {about['kernel']}, torch {about['torch']}, Python {about['python']}."
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


def _cell(row: Row, column: str) -> str:
    """A figure, and its spread in brackets."""
    value = row[column]
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    spread = row.get(f"{column}_spread")
    return text if spread is None else f"{text} ({spread[0]:g} to {spread[1]:g})"


if __name__ == "__main__":
    main()
