"""The rendezvous of a pair group, over the control channel that both nodes hold anyway.

A TCPStore would listen on every interface and show its keys to every process that connects; control messages are
authenticated. One store lives as long as one link: when the link is built, NCCL's headers travel here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError


class LinkStore(Store):
    """A c10d Store of two parties: `set` also sends the entry to the peer, `feed` takes the peer's in.

    torch calls it from the thread that builds the link; `feed` and `abort` come from the control thread.
    """

    MAX_ENTRIES = 256
    MAX_VALUE_NBYTES = 1 << 20

    def __init__(self, send: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self.published: list[bytes] = []
        """What this end has set, for the peer to read."""
        self._changed = threading.Condition()
        self.aborted: str | None = None
        """Why the link was given up."""

    def feed(self, name: str, value: bytes) -> bool:
        """Take an entry of the peer; False when there are more entries or bytes than any backend needs."""
        with self._changed:
            if len(self._entries) >= self.MAX_ENTRIES or len(value) > self.MAX_VALUE_NBYTES:
                return False
            self._entries[name] = value
            self._changed.notify_all()
        return True

    def abort(self, reason: str) -> None:
        """Make every present and later wait fail."""
        with self._changed:
            self.aborted = self.aborted or reason
            self._changed.notify_all()

    def wait_aborted(self) -> None:
        """Block until the link is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self.aborted is not None)

    # ------------------------------------------------------------- entries that are read once, by the peer
    def post(self, key: str, value: bytes) -> None:
        """Send an entry that the peer will `take`. This end keeps none."""
        self._send(key, value)

    def take(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait for an entry of the peer and remove it. DistStoreError: it did not come, or the link was given up."""
        self.wait([key], None if timeout_s is None else timedelta(seconds=timeout_s))
        with self._changed:
            return self._entries.pop(key)

    # ------------------------------------------------------------------ what torch calls
    def set(self, key: str, value: str | bytes) -> None:
        """Store an entry here and at the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.published.append(data)
        self.feed(key, data)
        self._send(key, data)

    def get(self, key: str) -> bytes:
        """The value of `key`, once it is there."""
        self.wait([key])
        with self._changed:
            return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. DistStoreError: they did not come, or the link was given up."""
        timeout_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)
        with self._changed:
            there = self._changed.wait_for(lambda: self.aborted is not None or self.check(keys), timeout_s)
        if self.aborted is not None:
            raise DistStoreError(self.aborted)
        if not there:
            raise DistStoreError(f"the peer did not set {keys} within {timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._entries for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. It is local, since the peer of a pair counts nothing."""
        with self._changed:
            total = int(self._entries.get(key, b"0")) + amount
            self._entries[key] = str(total).encode()
            self._changed.notify_all()
        return total
