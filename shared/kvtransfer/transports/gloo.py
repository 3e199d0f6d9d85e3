"""Links over gloo pair groups, built without any default process group. All of gloo's underscore API is here.

What gloo does that shapes this file (measured on torch 2.13):
- any wait that times out closes the pair, so there is no polling: `Op.wait` blocks, and an op's timeout kills
  the link;
- an op waiting in the middle of a message may not notice a killed peer before its own timeout, but a receive
  on a tag on which nothing is sent (the canary) fails within milliseconds; waiting on it with a tiny timeout is
  also the one way to abort the pair at will;
- a group rebuilt under a name that was used before is half broken: names are never reused;
- starting a send writes into the socket what it takes, for up to a millisecond of a 4 MiB chunk. So a thread of its
  own starts sends, and the next chunk is gathered and digested meanwhile;
- a device listens for as long as its pair lives, keeps a descriptor for each stranger that connects to its port, and
  aborts the process when no descriptor is left. So gloo is for trusted networks; `tcp` is for others.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Work

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import Link, LinkSpec
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import (
    NONCE_NBYTES,
    HeadedSlot,
    RingArrival,
    challenge,
    receive_headed,
)
from shared.protocol.transfer_messages import Place

_CANARY_TAG = 0x7FFFFFF0
_CANARY_WAIT = timedelta(days=3650)
_ABORT_WAIT = timedelta(milliseconds=1)
_FIRST_DATA_TAG = 16
_NUM_DATA_TAGS = 1 << 20
"""Tags are 32 bits. They may repeat: only as many messages are under way as there are slots, in order."""


class _Group(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...


@dataclass(frozen=True)
class GlooLinkFactory:
    """Builds links that bind `options.bind_host`."""

    options: TransferOptions
    device: torch.device
    threads: DeviceThreads

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return None

    def new_slot(self, nbytes: int) -> HeadedSlot:
        return HeadedSlot.new(nbytes, self.device)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "gloo builds by blocking"
        try:
            # A device listens from its making on, so neither end makes one before the other is there.
            spec.store.set(f"gloo/{spec.rank}", b"here")
            spec.store.wait([f"gloo/{1 - spec.rank}"])
            return GlooLink(spec, self._group(spec), on_dead, self.threads)
        except RuntimeError as error:
            raise LinkError(f"building link {spec.name}: {_first_line(error)}") from None

    def _group(self, spec: LinkSpec) -> _Group:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.options.op_timeout_s)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self.options.bind_host)]
        group: _Group = gloo(spec.store, spec.rank, 2, options)
        return group


class GlooLink:
    """One pair group, a thread that starts sends, and a canary thread that notices when the peer is gone."""

    def __init__(
        self,
        spec: LinkSpec,
        group: _Group,
        on_dead: Callable[[str], None],
        threads: DeviceThreads,
    ) -> None:
        self._peer = 1 - spec.rank
        self._group = group
        self._ring = spec.ring
        self.max_arrivals = spec.ring.num_slots
        self._on_dead = on_dead
        self._starter = threads.executor(f"sender {spec.name}")
        challenge(spec, self._exchange)
        self._canary = group.recv([torch.zeros(1, dtype=torch.uint8)], self._peer, _CANARY_TAG)
        self._canary_thread = threads.start(f"canary {spec.name}", self._watch)

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> GlooSend:
        assert isinstance(slot, HeadedSlot)
        slot.header = header
        message, tag = slot.message(nbytes), _data_tag(seq)
        return GlooSend(self._starter.submit(self._start, self._group.send, message, tag))

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        return receive_headed(
            self._ring, nbytes, lambda message: self._start(self._group.recv, message, _data_tag(seq))
        )

    def abort(self) -> None:
        """The canary's timeout closes the pair, which fails everything that waits on it."""
        try:
            self._canary.wait(_ABORT_WAIT)
        except RuntimeError:
            return
        raise AssertionError("the peer sent on the canary's tag")

    def close(self) -> None:
        self.abort()
        self._starter.shutdown()
        self._canary_thread.join()

    def _start(
        self, op: Callable[[list[torch.Tensor], int, int], Work], buffer: torch.Tensor, tag: int
    ) -> GlooOp:
        return GlooOp(lambda: op([buffer], self._peer, tag), buffer)

    def _watch(self) -> None:
        try:
            self._canary.wait(_CANARY_WAIT)
            reason = "the peer sent on the canary's tag"
        except RuntimeError as error:
            reason = f"the peer is gone: {_first_line(error)}"
        self._on_dead(reason)

    def _exchange(self, turn: int, ours: bytes) -> bytes:
        theirs = torch.zeros(NONCE_NBYTES, dtype=torch.uint8)
        sending = self._start(self._group.send, torch.frombuffer(bytearray(ours), dtype=torch.uint8), turn)
        self._start(self._group.recv, theirs, turn).wait(block=True)
        sending.wait(block=True)
        return bytes(theirs.numpy())


class GlooOp:
    """A send or receive; holds the buffer, since gloo reads or writes it from its own thread.

    An op that cannot be started fails when it is waited for. An error kept by the future of a send would hold its
    traceback, and with it the link and gloo's port.
    """

    def __init__(self, start: Callable[[], Work], buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._work: Work | None = None
        self._failure: str | None = None
        try:
            self._work = start()
        except RuntimeError as error:
            self._failure = _first_line(error)

    def wait(self, *, block: bool) -> bool:
        assert block, "a gloo op cannot be polled"
        if self._work is not None and self._failure is None:
            try:
                self._work.wait()
            except RuntimeError as error:
                self._failure = _first_line(error)
        if self._failure is not None:
            raise LinkError(self._failure)
        return True


class GlooSend:
    """A send that the data thread starts. From here until it has left, its slot must not be written."""

    def __init__(self, started: Future[GlooOp]) -> None:
        self._started = started

    def wait(self, *, block: bool) -> bool:
        assert block, "a gloo op cannot be polled"
        return self._started.result().wait(block=True)


def _data_tag(seq: int) -> int:
    return _FIRST_DATA_TAG + seq % _NUM_DATA_TAGS


def _first_line(error: RuntimeError) -> str:
    """gloo prefixes the message with a path of its build machine, and ends it with advice for other uses."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.rsplit("] ", 1)[-1].partition(". This is typically caused by")[0]
