"""The rendezvous of a pair group, over the control channel that both nodes hold anyway.

A TCPStore would listen on every interface and show its keys to every process that connects; control messages are
authenticated. One store lives as long as the building of one link.
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
        self._aborted: str | None = None

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
            self._aborted = reason
            self._changed.notify_all()

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
            there = self._changed.wait_for(lambda: self._aborted is not None or self.check(keys), timeout_s)
        if self._aborted is not None:
            raise DistStoreError(self._aborted)
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

    def delete_key(self, key: str) -> bool:
        """Forget an entry of this side."""
        with self._changed:
            return self._entries.pop(key, None) is not None

    def num_keys(self) -> int:
        """Entries on this side."""
        return len(self._entries)

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every wait."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The bound of every wait."""
        return timedelta(seconds=self._timeout_s)
