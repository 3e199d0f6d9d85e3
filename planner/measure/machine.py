"""What a profile was measured on, and whether other processes used it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OTHERS_MATTER = 0.05
"""Of all cores' time: a share that others use from which on figures are doubtful."""
STEAL_MATTERS = 0.02
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds of all cores together, up to a point in time."""

    wall_s: float
    """Of the clock on the wall, times the number of cores."""
    busy_s: float
    steal_s: float
    """In which a virtual machine's core wanted to run, and another machine had it."""
    own_s: float
    """Of `busy_s`, what the measuring processes used."""


def read_cpu_times(pids: Sequence[int] = ()) -> CpuTimes:
    """From /proc/stat; `pids` are processes that measure beside this one."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(word) / _TICKS_S for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return CpuTimes(
        wall_s=time.monotonic() * (os.cpu_count() or 1),
        busy_s=user + nice + system + irq + softirq,
        steal_s=steal,
        own_s=time.process_time() + sum(map(process_cpu_s, pids)),
    )


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process of this user so far, all threads together."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python has for threads alone


class MachineWatch:
    """Looks at the machine at the beginning and the end of what is measured."""

    def __init__(self, read: Callable[[], CpuTimes] = read_cpu_times) -> None:
        self._read = read
        self._begin = read()

    def remarks(self, what: str) -> Iterator[str]:
        """What happened beside the measuring of `what` since this was made; each a sentence."""
        begin, end = self._begin, self._read()
        wall_s = end.wall_s - begin.wall_s
        if wall_s <= 0:
            return
        others = (end.busy_s - begin.busy_s - (end.own_s - begin.own_s)) / wall_s
        steal = (end.steal_s - begin.steal_s) / wall_s
        if others > OTHERS_MATTER:
            yield (
                f"Other processes used {others:.0%} of this machine's CPU time while {what} was measured: "
                "its figures may be too slow; measure again when the machine is idle."
            )
        if steal > STEAL_MATTERS:
            yield (
                f"Other virtual machines of this host took {steal:.0%} of the CPU time while {what} was measured: "
                "its figures may be too slow."
            )


def cpu_model() -> str:
    """As /proc/cpuinfo names it, else the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
