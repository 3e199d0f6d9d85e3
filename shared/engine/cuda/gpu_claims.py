"""The nodes of this host that share one GPU. Each has a file, which it keeps locked while it lives.

The kernel unlocks the files of a process that dies, so the claim of a dead node counts no more. Nodes see each other
where they are processes of one user and share a temporary folder; containers usually share none. Every user may write
to a temporary folder, so what another user has made there is not read: a FIFO would stop a node that opens it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

_CLAIMS, _LOADING = "node-*", "loading"
_DIGITS = 20


@dataclass(frozen=True)
class OtherNodes:
    """The other nodes on a GPU."""

    num_starting: int
    """Nodes that share what is left, and have not taken it yet."""
    nbytes: int
    """Memory of the other nodes: those that run, and those that start with a share that was given to them."""


def claims_folder(gpu_uuid: str) -> Path:
    """Where the nodes on one GPU have their files."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / gpu_uuid


class GpuClaim:
    """The place of one node among the nodes on a GPU, until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where `folder` or the folder that it is in is not this user's alone to write."""
        _make_private(folder.parent)
        _make_private(folder)
        self._folder = folder
        self._path = folder / f"node-{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = folder / f".{self._path.name}"
        self._file = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.take(0)
        unlocked.rename(self._path)  # no node sees the file before it is locked
        self._loading = os.open(folder / _LOADING, os.O_CREAT | os.O_RDWR, 0o600)

    def take(self, nbytes: int) -> None:
        """Tell the other nodes how much memory this node takes; 0 while that is not known."""
        os.pwrite(self._file, b"%*d" % (_DIGITS, nbytes), 0)

    def others(self) -> OtherNodes:
        """The other nodes that live. The files of dead nodes are removed."""
        found = [nbytes for path in self._folder.glob(_CLAIMS) if (nbytes := self._read(path)) is not None]
        return OtherNodes(found.count(0), sum(found))

    def try_alone(self) -> bool:
        """Try to become the one node that loads on the GPU, until `done_alone`."""
        try:
            fcntl.flock(self._loading, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.pwrite(self._loading, b"%*d" % (_DIGITS, os.getpid()), 0)
        return True

    def loader(self) -> int:
        """The process that loads on the GPU, or the last one that did; 0 before the first has told."""
        return int(os.pread(self._loading, _DIGITS, 0) or 0)

    def done_alone(self) -> None:
        """Let another node load on the GPU."""
        fcntl.flock(self._loading, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave the GPU to the other nodes."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        os.close(self._loading)

    def _read(self, path: Path) -> int | None:
        """What the node of a file takes. None for this node, and for a dead one."""
        if path == self._path:
            return None
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # the node has just left
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(file, _DIGITS, 0))
        else:
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(file)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        problem = error.strerror
    else:
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return
        problem = "another user may write to it"
    raise ConfigError(
        f"{folder}, where the nodes on a GPU have their files, cannot be used ({problem}); remove it, or set TMPDIR "
        "to a folder of your own, the same for all nodes"
    )
