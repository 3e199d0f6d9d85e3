"""What a profile was measured on, and whether other processes used it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OTHERS_MATTER = 0.05
"""Of all cores' time: a share that others use from which on figures are doubtful."""
_TICKS_S = os.sysconf("SC_CLK_TCK")


def others_cpu_s(pids: Sequence[int] = ()) -> float:
    """CPU seconds of this machine so far, but for this process and `pids`, which measure beside it; of /proc/stat."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(word) / _TICKS_S for word in words[1:9])
    # clock_getcpuclockid(3) of a process, which Python has for threads alone
    own = time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)
    return user + nice + system + irq + softirq + steal - own


@contextmanager
def watched(what: str, remarks: list[str], pids: Sequence[int] = ()) -> Iterator[None]:
    """Add a sentence to `remarks` if other processes than this one and `pids` use the machine meanwhile."""
    before_s, began_at = others_cpu_s(pids), time.monotonic()
    yield
    others = (others_cpu_s(pids) - before_s) / ((time.monotonic() - began_at) * (os.cpu_count() or 1))
    if others > OTHERS_MATTER:
        remarks.append(
            f"Other processes used {others:.0%} of this machine's CPU time while {what} was measured: its figures "
            "may be too slow; measure again when the machine is idle."
        )


def cpu_model() -> str:
    """As /proc/cpuinfo names it, else the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
