"""The benches' arithmetic, and how results are kept. What they measure is not tested: that is what they are for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from tests.bench.limits import Gemms, Memcpy, StreamingRead
from tests.bench.machine import machine, usable_cores
from tests.bench.stats import figure, hidden_share, percentile, ratios, significant
from tests.bench.suite import BENCHES, load, save
from tests.bench.table import report, table


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_measures_and_sums_up(name: str) -> None:
    module = importlib.import_module(f"tests.bench.{BENCHES[name].module}")
    assert callable(module.main) and callable(module.summary)
    assert module.__doc__


def test_a_figure_is_the_median_and_how_far_its_rounds_are_apart() -> None:
    assert figure("ms", [5.0, 1.0, 3.0]) == {"ms": 3.0, "ms_spread": [1.0, 5.0]}
    assert figure("ms", range(1, 21)) == {"ms": 10.5, "ms_spread": [2, 18]}
    assert figure("rate", [1234.56, 1234.56]) == {"rate": 1235.0, "rate_spread": [1235.0, 1235.0]}


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [percentile([10.0, 20.0, 30.0, 40.0], p) for p in (0, 25, 26, 99, 100)] == [10, 10, 20, 40, 40]


def test_significant_digits_keep_whole_numbers() -> None:
    assert [significant(x) for x in (0.0, 0.0012345, 1.23456, 98765.4)] == [0.0, 0.00123, 1.23, 98765.0]


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([1.0, 30.0], [2.0, 40.0]) == [0.5, 0.75]


def test_overlap_hides_the_share_by_which_a_step_comes_nearer_to_its_forward() -> None:
    assert hidden_share(12.0, 10.0, 10.0) == 1.0
    assert hidden_share(12.0, 12.0, 10.0) == 0.0
    assert hidden_share(12.0, 10.5, 10.0) == pytest.approx(0.75)
    assert hidden_share(12.0, 13.0, 10.0) == pytest.approx(-0.5)


def test_results_are_kept_a_row_a_line(tmp_path: Path) -> None:
    rows = [{"bench": "a", "ms": 1.5, "ms_spread": [1, 2]}, {"bench": "a", "ms": 2.5, "ms_spread": [2, 3]}]
    result = {"bench": "a", "summary": {"ms": 1.5}, "machine": machine(), "seconds": 1, "rows": rows}
    path = save(result, tmp_path / "kept")
    assert load(tmp_path / "kept") == {"a": result}
    assert json.dumps(rows[1]) in [line.strip() for line in path.read_text().splitlines()]


def test_a_table_has_what_is_the_same_in_all_rows_above_it() -> None:
    rows = [{"bench": "a", "cores": 2, "ms_spread": [i, i + 1]} for i in range(2)]
    assert table(rows).split() == ["a", "cores", "2", "ms_spread", "0..1", "1..2"]


def test_rows_are_reported_as_a_line_of_json_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"bench": "a", "x": 1}, {"bench": "b", "y": 2}]
    assert report(iter(rows)) == rows
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


@pytest.mark.parametrize("native", [True, False])
def test_limits_are_rates(native: bool) -> None:
    cores, before = usable_cores(), torch.get_num_threads()
    assert StreamingRead(cores, nbytes=4 << 20, native=native).gb_s() > 0
    assert Memcpy(cores[:1], nbytes=4 << 20, native=native).gb_s() > 0
    assert Gemms(3, [(32, 64), (64, 32)]).gflop_s() > 0
    assert torch.get_num_threads() == before


def test_without_a_compiler_limits_are_those_of_torch() -> None:
    assert StreamingRead([0], nbytes=4 << 20, native=False).method == "torch"
