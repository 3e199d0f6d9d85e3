"""What a figure was measured on, and when."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shared.cpu_cores import allowed_cores, one_thread_per_core
from shared.kernels.cpu.build import cpu_flags

MATTERS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""CPU flags that decide which kernels run."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def usable_cores() -> tuple[int, ...]:
    """The cores that local mode would share out here, in order."""
    return tuple(one_thread_per_core(allowed_cores()))


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """This thread, and those that it starts, on `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def machine() -> dict[str, Any]:
    """CPU, software, date, and how busy the machine was in the minute before: figures of a busy one are noisy."""
    return {
        "cpu": cpu_model(),
        "cpu_flags": [flag for flag in MATTERS if flag in cpu_flags()],
        "cores": len(usable_cores()),
        "last_level_cache_mib": last_level_cache_nbytes() >> 20,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """As /proc/cpuinfo names it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def last_level_cache_nbytes() -> int:
    """The largest cache that a core has a share in; 0 where the kernel does not say."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=0)
