"""Finds the cores of this machine, and divides them among the nodes that a router starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_ANY = re.compile(r"any:(\d{1,9})")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class CpuCores:
    """The threads of a forward: one pinned to each core of `pinned`, or `num_threads` that are not pinned."""

    num_threads: int
    pinned: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> CpuCores:
        """Parse `0-3,8` (one thread on each core) or `any:4` (four threads, not pinned). Raises ValueError."""
        allowed = allowed_cores()
        if free := _ANY.fullmatch(text):
            if not 1 <= int(free[1]) <= len(allowed):
                raise ValueError(
                    f"{text}: {free[1]} threads are not between 1 and {len(allowed)}: "
                    f"this process may use the cores {_write_list(allowed)}"
                )
            return cls(int(free[1]))
        cores = _parse_list(text)
        if absent := sorted(set(cores) - set(allowed)):
            raise ValueError(
                f"{text}: no core {_write_list(absent)} here; this process may use {_write_list(allowed)}"
            )
        return cls(len(cores), tuple(cores))

    @property
    def team(self) -> tuple[int, ...]:
        """The core of each thread. -1 where the kernel chooses."""
        return self.pinned or (-1,) * self.num_threads

    def __str__(self) -> str:
        return _write_list(self.pinned) if self.pinned else f"any:{self.num_threads}"


def own_cores() -> CpuCores:
    """The cores of a node without --cpu-cores: all that this process may use."""
    return split_cores(None, 1)[0]


def split_cores(cores: CpuCores | None, num_nodes: int) -> list[CpuCores]:
    """Divide `cores` (None: all that this process may use) among nodes, as equally as possible.

    Where there are more nodes than cores, each node gets one thread, and nodes share cores. Under a CPU quota of
    fewer cores no thread is pinned, because every container of a large machine would choose the same cores.
    """
    if not num_nodes:
        return []
    if cores is None:
        cores = _all_cores(num_nodes)
    each, rest = divmod(cores.num_threads, num_nodes)
    if not cores.pinned:
        return [CpuCores(max(each + (i < rest), 1)) for i in range(num_nodes)]
    if each == 0:
        return [CpuCores(1, (cores.pinned[i % cores.num_threads],)) for i in range(num_nodes)]
    starts = [i * each + min(i, rest) for i in range(num_nodes + 1)]
    shares = [cores.pinned[start:end] for start, end in pairwise(starts)]
    return [CpuCores(len(share), share) for share in shares]


def _all_cores(num_nodes: int) -> CpuCores:
    allowed = allowed_cores()
    whole = one_thread_per_core(allowed)
    ids = whole if len(whole) >= num_nodes else allowed
    quota = cpu_quota()
    granted = len(ids) if quota is None else max(int(quota), 1)
    if granted < len(ids) or not can_pin():
        return CpuCores(min(granted, len(ids)))
    return CpuCores(len(ids), tuple(ids))


def can_pin() -> bool:
    """True where the operating system can pin threads."""
    return hasattr(os, "sched_setaffinity")


def allowed_cores() -> list[int]:
    """The cores that this process may run on, which a container or `taskset` can restrict."""
    return sorted(os.sched_getaffinity(0)) if can_pin() else list(range(os.cpu_count() or 1))


def one_thread_per_core(cores: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Keep one hardware thread of each physical core. Two threads of a core would share its vector units."""
    kept: list[int] = []
    for core in sorted(cores):
        siblings = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
        same = _parse_list(siblings.read_text().strip()) if siblings.is_file() else [core]
        if not set(same) & set(kept):
            kept.append(core)
    return kept


def cpu_quota(own: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU time that the control groups grant, in cores (`docker run --cpus`). None: no limit.

    Both versions of control groups are read. The lowest quota of the own group and the groups above it counts.
    """
    if not own.is_file():
        return None
    quotas: list[float] = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version2 = controllers == ""
        if not version2 and "cpu" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            quotas += _quota_of((cgroups if version2 else cgroups / "cpu") / level, version2=version2)
    return min(quotas, default=None)


def _quota_of(group: Path, *, version2: bool) -> list[float]:
    names = ["cpu.max"] if version2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    files = [group / name for name in names]
    if not all(file.is_file() for file in files):
        return []
    quota, period = " ".join(file.read_text() for file in files).split()
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def _parse_list(text: str) -> list[int]:
    """Parse `0-3,8` into sorted integers. Raises ValueError."""
    cores: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of cores like 0-3,8, nor any:N")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or set(cores) & set(range(first, last + 1)):
            raise ValueError(f"{text!r} names a core twice, or a range that ends before it begins")
        cores += range(first, last + 1)
    return sorted(cores)


def _write_list(cores: Sequence[int]) -> str:
    """Write sorted integers as `0-3,8`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
