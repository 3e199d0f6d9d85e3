"""`router plan --measure` with the built-in model, at few points: real forwards, transfers, node and router."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.measure import phases
from planner.measure.command import main, make_parser
from planner.measure.forwards import MeasureLimits, tasks_of
from planner.measure.phases import measure
from planner.profile import load_profile
from shared import cli
from shared.protocol.messages import NodeLimits
from tests.patience import PATIENCE_S

FEW = MeasureLimits(engine_s=1e-3, max_passes=2, max_batch=2, max_tokens=128, transfer_s=1e-3)
ARGV = [
    "--cpu-cores",
    "any:1",
    "--max-total-tokens",
    "2048",
    "--chunked-prefill-size",
    "64",
    "--context-length",
    "256",
    "--schedule-policy",
    "lpm",
]


@pytest.mark.processes
def test_a_real_node_is_measured(tmp_path: Path) -> None:
    parser = make_parser()
    config = cli.node_config(parser, ARGV)
    seen: list[str] = []
    profile = measure(config, effort=FEW, on_progress=seen.append)

    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    node, forward = profile.node, profile.forward
    assert (node.pool_tokens, node.page_size, node.context_length) == (2048, 16, 256)
    assert (node.chunked_prefill_size, node.max_running_requests) == (64, 64)
    assert (node.schedule, node.host_kv_tokens) == ({"schedule_policy": "lpm"}, 0)
    assert node.kv_bytes_per_token == 2 * 8 * 4 * 32 * 2  # K and V, layers, heads, their size, bfloat16
    assert 0 < forward.decode_s(1, 16) < 10
    assert 0 < forward.extend_s([(0, 64)]) < 10
    assert profile.transfer.message_s > 0
    measured = {residual.what for residual in profile.measured.residuals}
    assert {"prefill 64", "decode 2x16", f"transfer {16 * node.kv_bytes_per_token}"} <= measured
    assert {"scheduler 1", "scheduler 2"} <= measured
    assert profile.measured.model == "builtin"
    assert {"prefill 64, pass 2", "transfer of 64 KiB"} <= set(seen)


def test_flags_of_a_node_are_in_its_profile() -> None:
    flags = ["--chunked-prefill-size", "64", "--disable-overlap-schedule", "--retract-policy", "host"]
    config = cli.node_config(make_parser(), [*flags, "--enable-jump-forward"])
    assert phases.changed_options(config.schedule) == {
        "disable_overlap_schedule": True,
        "retract_policy": "host",
        "enable_jump_forward": True,
    }


def test_points_stay_within_the_node() -> None:
    limits = NodeLimits(context_length=4096, max_total_num_tokens=10_000, max_running_requests=48)
    points = tasks_of(limits, 512, 16, has_cache=True, effort=MeasureLimits())
    extends = [span for point in points for span in point.spans]
    decodes = [point for point in points if point.batch]
    assert max(start + length for start, length in extends) < 4096
    assert max(start for start, _ in extends) > 3000
    assert {length for _, length in extends} >= {16, 256, 512}
    assert all(start % 16 == 0 for start, _ in extends)
    assert {point.batch for point in decodes} == {1, 2, 4, 8, 16, 32, 48}
    assert all(point.batch * (point.context + 16) <= 10_000 for point in decodes)
    assert not [
        point
        for point in tasks_of(limits, 512, 16, has_cache=False, effort=MeasureLimits())
        if point.spans and point.spans[0][0]
    ]


def test_a_small_context_has_points(tmp_path: Path) -> None:
    limits = NodeLimits(context_length=64, max_total_num_tokens=64, max_running_requests=1)
    points = tasks_of(limits, 512, 16, has_cache=True, effort=MeasureLimits())
    assert {bool(point.spans) for point in points} == {True, False}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--out", "/nowhere/profile.json"], "--out /nowhere/profile.json: there is no folder /nowhere"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--kv-tls"], "--kv-tls"),
    ],
    ids=["folder", "model", "transfer"],
)
def test_what_cannot_be_measured_is_refused(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argv if "--out" in argv else [*argv, "--out", str(tmp_path / "profile.json")]
    try:
        code = main(given)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("router plan --measure: ") and says in error
    assert not (tmp_path / "profile.json").exists()


def test_ctrl_c_ends_a_measurement_with_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(phases, "measure", stopped)
    assert main(["--out", str(tmp_path / "profile.json")]) == 130
    assert "stopped, without a profile" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    "flags", [["--profile", "none", "--slo-ttft-ms", "1", "--slo-itl-ms", "1"], ["--measure"]]
)
def test_packages_that_are_missing_are_named(flags: list[str], tmp_path: Path) -> None:
    without = "import sys; sys.modules.update(rich=None, scipy=None)"
    code = f"{without}; from planner.__main__ import main; sys.exit(main({['plan', *flags]}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    said = r"router plan( --measure)?: (error: )?rich, scipy missing: pip install 'baton-serve\[plan\]', .*\n"
    assert re.fullmatch(said, done.stderr), done.stderr
