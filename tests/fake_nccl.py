"""NCCL groups of two ranks in one process, without NCCL, and as unforgiving.

Messages have no tags: sends and receives meet in the order of the calls, and a pair of unequal length never ends. A
rank that is aborted leaves the ops of the other one under way. Until a rank is aborted, its receives may write to
their buffers.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store

from shared.kvtransfer.link import RECEIVER


class FakeNccl:
    """Makes the groups, which find each other by an id that travels over their store.

    Between `hold` and `release` no message arrives. With `connect_hangs` no group is ever connected.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_held = False
        self.connect_hangs = False
        self.events: list[str] = []
        """What happened to groups, in order."""
        self.pairs: dict[bytes, FakePair] = {}

    def new_group(self, store: Store, rank: int) -> FakeGroup:
        return FakeGroup(self, store, rank)

    def hold(self) -> None:
        """Let ops be posted that do not end."""
        self.is_held = True

    def release(self) -> None:
        """Let what is posted arrive."""
        with self.lock:
            self.is_held = False
            for pair in self.pairs.values():
                pair.match()

    def scribble(self) -> int:
        """Write to the buffer of every receive that is under way, as a late message would. Returns how many."""
        with self.lock:
            receives = [work for pair in self.pairs.values() for work in pair.receives if not work.is_over]
            for work in receives:
                work.buffer.fill_(0xEE)
            return len(receives)


class FakePair:
    """What both groups of a link share."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self.sends: deque[FakeWork] = deque()
        self.receives: deque[FakeWork] = deque()

    def match(self) -> None:
        while self.sends and self.receives and not self._nccl.is_held:
            send, receive = self.sends[0], self.receives[0]
            if send.is_over or receive.is_over or send.buffer.numel() != receive.buffer.numel():
                return
            receive.buffer.copy_(send.buffer)
            self.sends.popleft().done = self.receives.popleft().done = True


class FakeGroup:
    """One rank."""

    def __init__(self, nccl: FakeNccl, store: Store, rank: int) -> None:
        self._nccl = nccl
        self._store = store
        self._rank = rank
        self._pair = FakePair(nccl)
        self._works: list[FakeWork] = []
        self._aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self._nccl.connect_hangs:
            self._aborted.wait()
            raise RuntimeError("NCCL error: the communicator was aborted")
        if self._rank == RECEIVER:
            name = secrets.token_bytes(8)
            self._nccl.pairs[name] = self._pair
            self._store.set("nccl/id", name.hex())
            self._store.wait(["nccl/met"])
        else:
            name = bytes.fromhex(self._store.get("nccl/id").decode())
            self._pair = self._nccl.pairs[name]
            self._store.set("nccl/met", "")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._post(self._pair.sends.append, tensors[0])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._post(self._pair.receives.append, tensors[0])

    def abort(self) -> None:
        with self._nccl.lock:
            self._nccl.events.append(f"abort {self._rank}")
            for work in self._works:
                work.failed = not work.done
        self._aborted.set()

    def _post(self, enqueue: Callable[[FakeWork], None], buffer: torch.Tensor) -> FakeWork:
        with self._nccl.lock:
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            work = FakeWork(buffer)
            self._works = [work for work in self._works if not work.is_over] + [work]
            enqueue(work)
            self._pair.match()
            return work


class FakeWork:
    """Completion must be polled, and `wait` only orders streams."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.done = False
        self.failed = False

    @property
    def is_over(self) -> bool:
        return self.done or self.failed

    def is_completed(self) -> bool:
        return self.is_over

    def exception(self) -> Exception | None:
        return RuntimeError("NCCL communicator was aborted") if self.failed else None

    def wait(self) -> bool:
        assert self.is_over, "a wait that blocks the host is a defect"
        return True
