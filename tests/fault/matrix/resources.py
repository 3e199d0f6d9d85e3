"""The threads and open files of a process of the matrix, which must be back after a cell."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.processes import Process


@dataclass(frozen=True)
class Resources:
    """The threads and the open files of a process, by name."""

    threads: Counter[str]
    files: Counter[str]

    def is_within(self, baseline: Resources) -> bool:
        """Whether there are no more than there were."""
        return (
            self.threads.total() <= baseline.threads.total() and self.files.total() <= baseline.files.total()
        )


def resources(process: Process) -> Resources:
    """What a process has now."""
    of = Path("/proc") / str(process.pid)
    threads, files = Counter[str](), Counter[str]()
    for task in (of / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            threads[(task / "comm").read_text().strip()] += 1
    for descriptor in (of / "fd").iterdir():
        with contextlib.suppress(OSError):
            files[os.readlink(descriptor).partition(":[")[0]] += 1
    return Resources(threads, files)
