"""Twenty minutes of load on a fleet that nothing happens to: memory, threads and descriptors stay as they were."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.fleet_load import Load
from tests.modelzoo import make_model
from tests.processes import Fleet

SECONDS = 1200.0
WARM_UP_SHARE = 0.25
GROWTH_MIB = 24.0
"""Most that a process may grow after the warm-up."""


def run(seconds: float = SECONDS) -> Iterator[dict[str, object]]:
    """Measure every process after the warm-up and at the end, when nothing runs."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield from _run(Path(folder), seconds)


def _run(folder: Path, seconds: float) -> Iterator[dict[str, object]]:
    model = make_model(folder / "model", "llama")
    with Fleet(folder / "logs", model, "1P2D", flags=("--page-size", "4")) as fleet:
        load = Load(fleet.router.url)
        asyncio.run(load.learn())
        asyncio.run(load.run(seconds * WARM_UP_SHARE))
        fleet.router.wait_home()
        before = _measured(fleet)
        asyncio.run(load.run(seconds * (1 - WARM_UP_SHARE)))
        fleet.router.wait_home()
        after = _measured(fleet)
        grown = {name: round(after[name][0] - before[name][0], 1) for name in before}
        yield {
            "seconds": seconds,
            "requests": load.num_requests,
            "failed": len(load.failed),
            "wrong": len(load.wrong),
            **{f"{name} grew by MiB": mib for name, mib in grown.items()},
        }
        assert not load.failed and not load.wrong, [*load.failed[:5], *load.wrong[:5]]
        assert max(grown.values()) <= GROWTH_MIB, grown
        for name, (_, num_threads, num_files) in after.items():
            assert (num_threads, num_files) <= (before[name][1] + 2, before[name][2] + 2), name
        fleet.stop()


def _measured(fleet: Fleet) -> dict[str, tuple[float, int, int]]:
    """MiB, threads and descriptors of each process."""
    return {
        f"{process.name} {each.pid}": (each.memory_info().rss / 2**20, each.num_threads(), each.num_fds())
        for process in fleet.processes
        for each in process.family()
        if each.is_running()
    }
