"""Benches that are interrupted end what they started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

LEAVING_S = 60.0


def leave_on_signals() -> None:
    """From now on SIGINT and SIGTERM end this process as `sys.exit` does, by its `with` blocks.

    Only the first counts, so that nothing interrupts their ends. Servers run in sessions of their own: a signal from
    the terminal does not reach them.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave)


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit code of a bench in a process of its own. When this one leaves, that one is told to, and awaited.

    One that has not ended its servers after LEAVING_S is killed.
    """
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _leave(signum: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + signum)
