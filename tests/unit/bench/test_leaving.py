"""Benches that are interrupted while an engine loads, or that run in a process of another, leave nothing behind."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S, until
from tests.processes import assert_gone

LOADS_FOR_EVER = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
PREAMBLE = """
import sys
from pathlib import Path
from tests.bench.leaving import leave_on_signals, run_to_its_end
from tests.bench.peers.engines import BatonEngine, PeerEngine
leave_on_signals()
"""
PEER = f"""
with PeerEngine("slow", (sys.executable, "-c", {LOADS_FOR_EVER!r}), {{}}, Path(sys.argv[1], "log")):
    pass
"""
BATON = """
with BatonEngine("0P1D", Path("builtin"), 4096, Path(sys.argv[1])):
    pass
"""
PARENT = f"""
run_to_its_end([sys.executable, "-c", {PREAMBLE + PEER!r}, sys.argv[1]])
"""


@contextlib.contextmanager
def family(code: str, folder: Path, size: int) -> Iterator[tuple[psutil.Popen, list[psutil.Process]]]:
    """A process that runs `code`, and its children when there are `size` processes in all."""
    with (folder / "stderr").open("wb") as stderr:
        parent = psutil.Popen(
            [sys.executable, "-c", PREAMBLE + code, str(folder)], stderr=stderr, start_new_session=True
        )
    children: list[psutil.Process] = []
    try:
        until(lambda: len(parent.children(recursive=True)) + 1 >= size, "all have started")
        children = parent.children(recursive=True)
        yield parent, children
    finally:
        for process in (*children, parent):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("code", "size", "signum"),
    [(PEER, 3, signal.SIGINT), (BATON, 3, signal.SIGTERM), (PARENT, 4, signal.SIGTERM)],
    ids=["peer", "baton", "parent"],
)
def test_nothing_is_left(code: str, size: int, signum: signal.Signals, tmp_path: Path) -> None:
    with family(code, tmp_path, size) as (parent, children):
        parent.send_signal(signum)
        assert parent.wait(PATIENCE_S) == 128 + signum
        assert_gone(children)
    assert "Traceback" not in (tmp_path / "stderr").read_text()
