"""`router plan` as a process: its outputs, its refusals, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from planner import plan
from planner.answer import Answer
from planner.candidate import Candidate
from planner.plan_traffic import traffic_of
from planner.sample import Trial
from planner.table import print_answer
from planner.workers import simulating
from tests.patience import PATIENCE_S
from tests.unit.planner.plan_rig import PROFILE, asked, planted, traffic

pytestmark = pytest.mark.xdist_group("router plan")
"""One process has the plan that several tests look at."""

DRAWN = ["--rate", "2", "--prompt", "64", "--output", "5", "--requests", "20"]
SLOS = ["--slo-ttft-ms", "500", "--slo-itl-ms", "50"]
ASKED = [*DRAWN, *SLOS, "--nodes", "2", "--seed", "1"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command says on stderr before it ends with code 2."""
    try:
        code = plan.main(argv)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert code == 2 and not said.out, said
    assert said.err.count("\n") == 1 and said.err.startswith("router plan: error: "), said.err
    return said.err


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """`router plan` of two nodes, with every output."""
    folder = tmp_path_factory.mktemp("plan")
    PROFILE.save(folder / "profile.json")
    argv = ["plan", "--profile", "profile.json", *ASKED, "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "router", *argv, "--json", "answer.json", "--html", "answer.html"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done, folder


def test_table_json_and_html_of_one_answer(outputs: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = outputs
    assert done.returncode == 0, done.stderr
    answer = msgspec.json.decode((folder / "answer.json").read_bytes(), type=Answer)
    assert answer.question.traffic.rate == pytest.approx(2.0)
    assert answer.verdict.headline in done.stdout
    html = (folder / "answer.html").read_text()
    for one in answer.candidates:
        assert one.name in done.stdout and one.name in html
        assert f"{one.name}: up to" in done.stderr, "progress"


def test_the_same_seed_gives_the_same_answer(
    outputs: tuple[subprocess.CompletedProcess[str], Path], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Here in one process, and to stdout, where the table is left out."""
    _, folder = outputs
    argv = ["--profile", str(folder / "profile.json"), *ASKED, "--jobs", "1"]
    assert plan.main([*argv, "--json", "-"]) == 0
    here = json.loads(capfdbinary.readouterr().out)
    there = json.loads((folder / "answer.json").read_bytes())
    for one in (here, there):
        del one["question"]["at"], one["question"]["profile"]
    assert here == there


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --profile, --slo-ttft-ms, --slo-itl-ms"),
        ([*SLOS, "--nodes", "8..1"], "--nodes: it is 1..8 or 4, with numbers from 1 to 64"),
        ([*SLOS, "--nodes", "0"], "--nodes"),
        ([*SLOS, "--nodes", "1..65"], "--nodes"),
        ([*SLOS, "--good-share", "1.5"], "--good-share"),
        (["--slo-ttft-ms", "0", "--slo-itl-ms", "5"], "--slo-ttft-ms"),
        ([*SLOS, "--profile", "p", "--json", "no/folder/x"], "no/folder/x: No such file or directory"),
        ([*SLOS, "--profile", "p", "--html", "/"], "/: Is a directory"),
        ([*SLOS, "--profile", "p", "--html", "x", "--json", "x"], "x: --json and --html need a file each"),
        ([*SLOS, "--requests", "3"], "--requests"),
    ],
)  # fmt: skip
def test_wrong_flags(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refusal(capsys, *argv)


def test_wrong_files(capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path) -> None:
    known = ["--profile", str(profile), *SLOS]
    assert "No such file" in refusal(capsys, "--profile", "none.json", *SLOS, *DRAWN)
    profile_of_old = tmp_path / "old.json"
    profile_of_old.write_text('{"schema_version": 0}')
    assert "`$.schema_version`" in refusal(capsys, "--profile", str(profile_of_old), *SLOS, *DRAWN)
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
    trace.write_text(good + good.replace("10", '"ten"'))
    assert "line 2" in refusal(capsys, *known, "--trace", str(trace))
    trace.write_text(good)
    assert "arrive at one time" in refusal(capsys, *known, "--trace", str(trace))
    assert "--rate" in refusal(capsys, *known, "--trace", str(trace), "--rate", "1")
    assert "missing: --prompt, --output" in refusal(capsys, *known, "--rate", "1")
    assert "--prompt 9:1" in refusal(capsys, *known, "--rate", "1", "--prompt", "9:1", "--output", "5")


def test_of_a_long_trace_the_busiest_part_is_planned_for(tmp_path: Path) -> None:
    """A hundred requests a second apart, of which thirty in the middle are ten times as fast."""
    gaps = [1.0] * 50 + [0.1] * 30 + [1.0] * 20
    trace = tmp_path / "trace.jsonl"
    row = '{{"timestamp": {:.0f}, "input_length": 10, "output_length": 2}}\n'
    trace.write_text("".join(row.format(1000 * at) for at in accumulate(gaps, initial=0.0)))
    argv = ["--profile", "p", "--trace", str(trace), "--requests", "30", *SLOS]
    traffic = traffic_of(plan.build_parser().parse_args(argv))
    assert (len(traffic.counted), traffic.num_warmup, traffic.requests[0].at_s) == (30, 30, 0.0)
    assert traffic.rate == pytest.approx(10.0)
    assert "Of the 101 requests, the 30 that follow" in traffic.remarks[-1]
    assert traffic_of(plan.build_parser().parse_args([*argv, "--requests", "101"])).num_warmup == 0


# ------------------------------------------------------------------------------------------------------ signals
@pytest.fixture
def planning(profile: Path) -> Iterator[psutil.Process]:
    """A plan that takes minutes, once its processes simulate."""
    argv = ["plan", "--profile", str(profile), *SLOS, "--nodes", "1..8", "--jobs", "2"]
    drawn = ["--rate", "5", "--prompt", "900:2000", "--output", "200", "--requests", "2000"]
    started = subprocess.Popen(
        [sys.executable, "-m", "router", *argv, *drawn],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    parent = psutil.Process(started.pid)
    until = time.monotonic() + PATIENCE_S
    while sum(child.cpu_times().user > 1.0 for child in parent.children()) < 2:
        assert started.poll() is None and time.monotonic() < until, "they simulate"
        time.sleep(0.05)
    children = parent.children(recursive=True)
    try:
        yield parent
        out, _ = started.communicate(timeout=PATIENCE_S)
        assert b"Traceback" not in out, out
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive, "no process outlives the command"
    finally:
        for process in (parent, *children):
            if process.is_running():
                process.kill()
        started.wait()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_ends_every_process(planning: psutil.Process, signum: signal.Signals, code: int) -> None:
    """Ctrl-C in a terminal goes to all of them; SIGKILL to the command alone."""
    if signum == signal.SIGINT:
        os.killpg(planning.pid, signum)
    else:
        planning.send_signal(signum)
    assert planning.wait(PATIENCE_S) == code


def test_a_process_that_was_killed_is_named(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--profile", str(profile), *SLOS, "--nodes", "1", "--jobs", "1"]
    drawn = ["--rate", "5", "--prompt", "900:2000", "--output", "200", "--requests", "2000"]
    killer = threading.Thread(target=_kill_the_worker)
    killer.start()
    assert plan.main([*flags, *drawn]) == 1
    killer.join()
    assert "was it out of memory?" in capsys.readouterr().err


def test_an_error_of_a_simulation_says_where_it_was_raised() -> None:
    node = msgspec.structs.replace(
        PROFILE.node, schedule={"schedule_policy": "unknown"}
    )  # as no file may have it
    of_later = msgspec.structs.replace(PROFILE, node=node)
    setting = asked(of_later, of=traffic(20, rate=1.0)).setting

    async def run() -> None:
        async with simulating(setting, 1) as simulate:
            fleet = Candidate(num_prefill=0, num_decode=1)
            await simulate(Trial(candidate=fleet, load=1.0))

    with pytest.raises(KeyError, match="unknown") as raised:
        asyncio.run(run())
    assert "in _simulate" in str(raised.value.__cause__)


def _kill_the_worker() -> None:
    """The child of this process that simulates, once it does."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a child that has ended, perhaps that of another test
                if "spawn_main" in " ".join(child.cmdline()) and child.cpu_times().user > 1.0:
                    return child.kill()
        time.sleep(0.05)
    return None


# -------------------------------------------------------------------------------------------------- the table
def test_a_table_shows_what_is_true_of_the_answer() -> None:
    question = asked(PROFILE, of=traffic(100, rate=2.6), nodes=range(1, 4))
    answer = planted(question, lambda candidate: candidate.num_nodes)
    console = Console(width=200, record=True, file=io.StringIO())
    print_answer(answer, console)
    text = console.export_text()
    for words in (
        "3 together",
        answer.verdict.headline,
        "TTFT p50 p99, ms",
    ):
        assert words in text, text
    assert all(reason in text.replace("\n", " ") for reason in answer.verdict.reasons)
