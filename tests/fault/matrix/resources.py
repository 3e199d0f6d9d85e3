"""The threads and open files of a process of the matrix, which must be back after a cell."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import Process

THREADS = {"shm": (3, 2), "cuda-ipc": (3, 2), "gloo": (6, 4), "tcp": (4, 3), "tls": (4, 3)}
"""Of the end of a link that sends, and of the one that receives. Both have the link's own thread and its `canary`;
with gloo two of gloo's; with tcp and tls an `io`. The end that sends has a `copier`, and with gloo a `sender`."""
FILES = {"shm": (7, 3), "cuda-ipc": (7, 3), "gloo": (9, 6), "tcp": (5, 2), "tls": (5, 2)}
"""Likewise. The control thread of the end that sends has dialled the other: a socket and three eventfds of ZMQ there,
a socket here. The link itself has a socket. For its one slot (`--kv-slots 1`), shm has a memfd that mmap opens once
more, and where it is read what mmap has opened; cuda-ipc has a pipe, and where it is read one end of that. Gloo has a
listener, an epoll and a pipe."""
PORT_THREADS, PORT_FILES = 1, 4
"""Of `--kv-port`, which tcp and tls open with the first link that a node receives over: its thread; a listener, an
epoll and two sockets that wake it."""

DRIVERS_OWN = "/dev/nvidia"
"""What CUDA's driver opens when it likes, and for as long as it likes, counts for no link."""


@dataclass(frozen=True)
class Resources:
    """The threads and the open files of a process, by name."""

    threads: Counter[str]
    files: Counter[str]

    def with_links(self, transport: str, incoming: Sequence[bool], *, has_port: bool) -> Resources:
        """What it has with one link more for each of `incoming`, which says whether pages come in over it."""
        num_ports = int(transport in ("tcp", "tls") and any(incoming) and not has_port)
        threads = sum(THREADS[transport][end] for end in incoming) + PORT_THREADS * num_ports
        files = sum(FILES[transport][end] for end in incoming) + PORT_FILES * num_ports
        return Resources(self.threads + Counter(link=threads), self.files + Counter(link=files))

    def is_within(self, baseline: Resources) -> bool:
        """Whether there are no more than there were."""
        return (
            self.threads.total() <= baseline.threads.total() and self.files.total() <= baseline.files.total()
        )


def resources(process: Process) -> Resources:
    """What a process has now."""
    of = Path("/proc") / str(process.pid)
    threads, names = Counter[str](), []
    for task in (of / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            threads[(task / "comm").read_text().strip()] += 1
    for descriptor in (of / "fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(descriptor))
    return Resources(threads, count_files(names))


def count_files(names: Iterable[str]) -> Counter[str]:
    """Open files by the kind that /proc names, without those of CUDA's driver."""
    return Counter(name.partition(":[")[0] for name in names if not name.startswith(DRIVERS_OWN))
