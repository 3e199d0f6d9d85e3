"""What a profile was measured on, and whether other processes used it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

OTHERS_MATTER = 0.05
"""Of all cores' time: a share that others use from which on figures are doubtful."""
_TICKS_S = os.sysconf("SC_CLK_TCK")


def others_cpu_s(pids: Sequence[int] = ()) -> float:
    """CPU seconds of this machine so far, but for this process and `pids`, which measure beside it; of /proc/stat."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(word) / _TICKS_S for word in words[1:9])
    return user + nice + system + irq + softirq + steal - time.process_time() - sum(map(process_cpu_s, pids))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process of this user so far, all threads together."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python has for threads alone


class MachineWatch:
    """Looks at the machine at the beginning and the end of what is measured."""

    def __init__(self, read: Callable[[], float] = others_cpu_s) -> None:
        self._read = read
        self._begin = time.monotonic(), read()

    def remarks(self, what: str) -> Iterator[str]:
        """What happened beside the measuring of `what` since this was made; each a sentence."""
        began_at, before_s = self._begin
        cores_s = max(time.monotonic() - began_at, 1e-3) * (os.cpu_count() or 1)
        others = (self._read() - before_s) / cores_s
        if others > OTHERS_MATTER:
            yield (
                f"Other processes used {others:.0%} of this machine's CPU time while {what} was measured: "
                "its figures may be too slow; measure again when the machine is idle."
            )


def cpu_model() -> str:
    """As /proc/cpuinfo names it, else the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
