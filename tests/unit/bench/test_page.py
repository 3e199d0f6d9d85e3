"""Kept results can be drawn and worded, and the same results give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import attention, decode, failover, interference, moves, overlap, prefill, trace_serving
from tests.bench.models import SHAPES
from tests.bench.page import COLUMNS, ENGINES, PAGE, WORKLOADS, filled
from tests.bench.planner import compared, summary
from tests.bench.plots import DRAWINGS, draw_all
from tests.bench.servers import TokenStream
from tests.bench.targets import TARGETS, Target, targets_table

LLAMA = SHAPES["llama-160m"]
ENGINE = {"model": "llama-160m", "kernels": "native", "cores": 1}
MACHINE = {
    "cpu": "some CPU",
    "cpu_flags": ["avx2"],
    "cores": 2,
    "last_level_cache_mib": 32,
    "memory_gib": 8.0,
    "kernel": "6",
    "torch": "2",
    "python": "3",
    "date": "2026-01-01 00:00 UTC",
    "load_before": 0.1,
}
STREAM = TokenStream(0.0, times=[0.1, 0.2, 0.3], meta={"completion_tokens": 3})
GAPS = interference.Seen(beside=[5.0, 6.0], quiet=[4.0], ttfts=[1000.0])
HEADS = attention.HEADS[0]

PEERS = [
    {"bench": "peers", "workload": workload, "engine": engine, "seconds": 2.0, "against_best": ratio}
    | {"against_best_spread": [ratio, ratio]}
    for workload in ("single", "batch")
    for engine, ratio in (("baton-0P1D", 1.3), ("vllm", 1.0))
] + [{"bench": "peers_memory", "engine": "vllm", "version": "1", "peak_mib": 900}]

ROWS: dict[str, list[dict[str, Any]]] = {
    "decode": [
        {**ENGINE, "batch": batch, "context": 512}
        | decode.figures(LLAMA, batch, 512, [30.0, 31.0], [200.0, 201.0], [0.011, 0.012])
        for batch in (1, 8)
    ],
    "prefill": [
        {**ENGINE, "cached": 0, "length": n} | prefill.figures(LLAMA, 0, n, [200.0], [1.0])
        for n in (512, 2048)
    ],
    "attention": [
        {"bench": "attention_decode", "kernels": "native", "heads": str(HEADS), "batch": 8, "context": 512}
        | attention.decode_figures(HEADS, 4096, [30.0], [1e-2], [1e-3]),
        {"bench": "attention_extend", "kernels": "native", "heads": str(HEADS), "cached": 0, "length": 512}
        | attention.extend_figures(HEADS, 0, 512, [200.0], [1e-2], [1e-3]),
    ],
    "transfer": [
        {"backend": "gloo", "slots": "4 x 4 MiB", "batch_mib": mib, "limit": "raw gloo"}
        | {"whole_path_gb_s": 2.0, "limit_gb_s": 3.0, "ratio": 0.67}
        for mib in (1, 256)
    ],
    "scheduling": [
        {"policy": "fcfs", "num_waiting": 1000, "slot_free": True, "ignore_eos": False, "priority": False}
        | {"cache_changes": True, "step_ms": 0.7, "step_p99_ms": 0.9}
    ],
    "overlap": [
        {"device": "builtin, native", "num_running": 8, "added_ms": 0.0}
        | overlap.figures([(0.012, 0.011, 0.01)], 8)
    ],
    "interference": [interference.row(name, [GAPS], [6.0]) for name in interference.FLEETS],
    "trace": [trace_serving.row("1P1D", 1.0, [[STREAM]])],
    "serving": [
        {"bench": "output_tokens_per_s", "streams": 1, "overlap_on": 2.0, "overlap_off": 1.0, "ratio": 2.0},
        {"bench": "ttft_1000_tokens", "cold_ms": 200.0, "cached_ms": 10.0, "ratio": 20.0},
    ],
    "router": [
        {"workers": 1, "dialect": "chat", "streams": 32, "offered_tokens_s": 10_000, "tokens_s": 9_000}
        | {"tokens_an_event": 1.0, "tokens_s_one_core": 28_000}
    ],
    "failover": [
        failover.detection_row("decode node killed", [0.01], 0.1),
        failover.killed_row([(0.3, 0.2)], cached=False),
        moves.moved_row(1000, [moves.Pause(moving_s=0.03, quiet_s=0.02, step_s=0.015)]),
        {"bench": "drain", "streams": 32, "context": 1000, "drain_s": 2.0, "ratio": 4.0, "wrong": 0},
    ],
    "cold_start": [
        {"bench": "help", "command": "router", "seconds": 0.3},
        {"bench": "cold_start", "phase": "imports", "seconds": 2.0},
        {"bench": "cold_start", "phase": "generation", "seconds": 1.0},
        {"bench": "cold_start", "phase": "first answer", "seconds": 3.0},
    ],
    "memory": [
        {"model": "builtin", "node": "d0", "after": "idle", "weights_mib": 14, "kv_mib": 100}
        | {"peak_mib": 300, "beyond_mib": 186}
    ],
    "sockets": [
        {"transport": "tcp", "batch_mib": 16, "whole_path_gb_s": 1.0, "raw_tcp_gb_s": 3.0, "ratio": 0.36}
    ],
    "peers_llama_160m": PEERS,
    "peers_qwen3_0_6b": PEERS,
}


def result(name: str, summary: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"bench": name, "summary": summary or {}, "machine": MACHINE, "seconds": 9, "rows": ROWS[name]}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_result_is_drawn_and_the_drawing_is_a_function_of_it(name: str, tmp_path: Path) -> None:
    drawings = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (path,) = draw_all({name: result(name)}, folder)
        drawings.append(path.read_bytes())
    assert path.name == f"{name}.svg"
    assert drawings[0].startswith(b"<?xml")
    assert drawings[0] == drawings[1]


def test_what_is_drawn_or_worded_is_measured() -> None:
    assert set(DRAWINGS) < set(COLUMNS) == set(ROWS)


def test_generated_parts_of_a_page_are_replaced_and_the_rest_stays() -> None:
    page = (
        "# Title\n\n<!-- machine -->\nold\n<!-- /machine -->\n\nmine\n\n<!-- decode -->\n<!-- /decode -->\n"
    )
    once = filled(page, {"decode": result("decode")})
    assert once.startswith("# Title\n\n<!-- machine -->\n\nsome CPU (avx2), 2 cores")
    assert "\nmine\n" in once and "old" not in once
    assert "![decode](performance/decode.svg)" in once
    assert "| llama-160m | 1 | native | 8 | 512 | 11.5 (11 to 12) |" in once
    assert filled(once, {"decode": result("decode")}) == once
    assert "Not measured." in filled(once, {})


@pytest.mark.parametrize("name", COLUMNS)
def test_every_result_has_a_table(name: str) -> None:
    text = filled(f"<!-- {name} -->\n<!-- /{name} -->", {name: result(name)})
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(tables) >= len(ROWS[name]) + 2
    assert all(line.count("|") >= 3 for line in tables)


def test_the_page_has_every_bench_that_is_worded() -> None:
    text = PAGE.read_text()
    for name in (*COLUMNS, "targets", "machine"):
        assert f"<!-- {name} -->\n" in text and f"\n<!-- /{name} -->" in text, name


def test_predictions_stand_beside_what_was_measured() -> None:
    even = {"goodput": 2.0, "cached_share": 0.0} | {
        f"{name}_{which}_ms": 100.0 for name in ("ttft", "itl") for which in ("mean", "p50", "p99")
    }
    about = {
        "bench": "error",
        "kernels": "timed",
        "fleet": "1P1D",
        "part": "azure",
        "rate": 2.0,
        "cpu_share": 0.2,
    }
    rows = [about | compared(even | {"ttft_mean_ms": ms}, [even, even]) for ms in (150.0, 101.0)]
    about_all = {"bench": "planner", "summary": summary(rows), "machine": MACHINE, "seconds": 9}
    fitted = {"bench": "fit", "step_us": 900}
    text = filled("<!-- planner -->\n<!-- /planner -->", {"planner": about_all | {"rows": [fitted, *rows]}})
    assert "1 of 2 hit." in text
    missed, hit = [line for line in text.splitlines() if line.startswith(("| hit", "| **missed**"))]
    assert missed.startswith("| **missed** | timed | 1P1D | azure | 2x |")
    assert "| 150 / 100<br>+50.0 % (0.0) |" in missed and "| 101 / 100<br>+1.0 % (0.0) |" in hit
    assert "<!-- planner -->\n" in PAGE.read_text()


def test_targets_are_met_missed_or_not_measured() -> None:
    results = {
        "decode": result("decode", {"least_ratio": 0.6, "single_stream_ratio_read": 0.7}),
        "cold_start": result("cold_start", {"ready_s": 10.5, "slowest_help_s": 0.5}),
    }
    verdicts = [line.split(" | ")[2:] for line in targets_table(results).splitlines()[2:]]
    by_key = dict(zip([target.key for target in TARGETS], verdicts, strict=True))
    assert by_key["least_ratio"] == ["0.6", "met |"]
    assert by_key["single_stream_ratio_read"] == ["0.7", "**missed** |"]
    assert by_key["ready_s"] == ["10.5 s", "**missed** |"]
    assert by_key["slowest_help_s"] == ["0.5 s", "met |"]
    assert by_key["beyond_mib"][0] == "not measured"


def test_a_bound_is_kept_at_the_bound() -> None:
    assert Target(what="", bench="", key="", at_least=3, unit="x").bound == "at least 3x"
    assert Target(what="", bench="", key="", at_most=0.5, unit=" s").bound == "at most 0.5 s"


def test_the_page_has_each_kind_of_machine() -> None:
    folders = [path.name for path in PAGE.with_suffix("").iterdir() if path.is_dir()]
    assert folders
    for name in folders:
        assert f"<!-- {name} -->\n" in PAGE.read_text(), name
    amx = {"decode": result("decode", {"least_ratio": 0.1})}
    text = filled("<!-- amx -->\n<!-- /amx -->\n", {}, {"amx": amx})
    assert "some CPU (avx2), 2 cores" in text
    assert text.count("\n| ") == 3  # two of the head, and the one target that was measured
    assert "| 0.1 | **missed** |" in text


def test_the_readme_compares_speed_with_other_engines() -> None:
    peers = result("peers_qwen3_0_6b") | {
        "rows": [
            {"workload": workload, "engine": engine, "seconds": 2.5, "against_best": 0.9}
            for workload in WORKLOADS
            for engine in ENGINES
        ]
    }
    text = filled(
        "<!-- speed -->\n<!-- /speed -->\n",
        {"peers_qwen3_0_6b": peers, "interference": result("interference")},
    )
    assert "2 cores of some CPU" in text
    assert text.count("| 2.5 s (0.9x) | 2.5 s (0.9x) | 2.5 s | 2.5 s |") == len(WORKLOADS)
    assert "| 6 ms | 6 ms |" in text
    assert "<!-- speed -->\n" in (PAGE.parents[1] / "README.md").read_text()
