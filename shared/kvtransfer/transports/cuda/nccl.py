"""Links over NCCL pair groups: staging slots lie in device memory and are sent from there.

Its logic runs against a fake group in the tests. NCCL itself HAS NOT RUN: the calls are written from the sources of
torch 2.11 to 2.13. NCCL refuses two ranks on one GPU.

What differs from gloo:
- headers travel over the control connection, as entries of the link's store, beside the payloads;
- NCCL has no tags: the order of the calls is the order of the messages;
- receives under way occupy the communicator in order, so there is no canary: a dead peer is noticed by the
  control connection, by pings, or by an op's timeout;
- only `abort` frees a thread that waits, and a kernel of a dead link may write to its slot until then. A supervisor
  thread for each link calls it as soon as the link is given up, or when building takes too long;
- `wait` only orders the current stream, so an op polls for completion and keeps the deadline itself;
- the interface is NCCL's choice: `bind_host` does not apply, set NCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError, Work

from shared import log
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import RECEIVER, Link, LinkSpec
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import (
    NONCE_NBYTES,
    RingArrival,
    challenge,
    receive_into,
)
from shared.protocol.transfer_messages import Place

_POLL_S = 100e-6


class NcclGroup(Protocol):
    """What a link needs of a ProcessGroupNCCL of two ranks."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Build the communicator now. Without it the first send would build another one."""
        ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None:
        """End the kernels of all ops, which fail; nothing reads or writes their memory afterwards."""
        ...


NewGroup = Callable[[Store, int], NcclGroup]
"""Makes the group of a rank over a store. RuntimeError: it cannot be made."""


def nccl_environment(options: TransferOptions) -> dict[str, str]:
    """What the process needs before its first NCCL group. Values that the operator has set win."""
    return {
        # The default, 3, ends the whole process when one peer dies.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # The monitor thread would end the process as well, after a timeout of its own.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # Building may wedge when the peer dies during it; the default is 30 minutes.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(options.build_timeout_s))),
    }


def configure(nccl_options: Any, options: TransferOptions) -> None:
    """Set the fields of a ProcessGroupNCCL.Options."""
    nccl_options._timeout = timedelta(seconds=options.op_timeout_s)
    nccl_options.is_high_priority_stream = False
    nccl_options.config.blocking = 0
    nccl_options.config.min_ctas = 1
    # Few thread blocks, so that a transfer does not take the GPU from decode kernels.
    nccl_options.config.max_ctas = options.nccl_max_ctas


def nccl_groups(options: TransferOptions, device: torch.device) -> NewGroup:
    """Groups of real NCCL. Sets the environment of the process. ConfigError: there is no NCCL here."""
    if device.type != "cuda":
        raise ConfigError(f"--kv-transfer nccl moves KV between GPUs; the KV pages are on {device}")
    if not torch.distributed.is_nccl_available():
        raise ConfigError("--kv-transfer nccl: this build of torch has no NCCL; use gloo")
    for name, value in nccl_environment(options).items():
        os.environ.setdefault(name, value)

    def new_group(store: Store, rank: int) -> NcclGroup:
        from torch.distributed import ProcessGroupNCCL

        group_type: Any = ProcessGroupNCCL
        nccl_options = group_type.Options()
        configure(nccl_options, options)
        group: NcclGroup = group_type(store, rank, 2, nccl_options)
        return group

    return new_group


@dataclass(frozen=True)
class NcclLinkFactory:
    """Builds links between `device` and another GPU. The thread of each works on a stream of its own."""

    options: TransferOptions
    device: torch.device
    new_group: NewGroup
    threads: DeviceThreads

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        if not theirs.gpu:
            return "the sending node has no GPU"
        return "NCCL refuses two ranks on one GPU" if ours.gpu == theirs.gpu else None

    def new_slot(self, nbytes: int) -> Slot:
        return Slot(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        """`on_dead` is never called: see the head of this file."""
        assert block, "NCCL builds by blocking"
        try:
            group = self.new_group(spec.store, spec.rank)
        except RuntimeError as error:
            raise LinkError(f"building link {spec.name}: {error}") from None
        supervisor = Supervisor(spec, group, self.options.build_timeout_s, self.threads)
        link = NcclLink(spec, group, supervisor, self.device, self.options.op_timeout_s)
        try:
            group.eager_connect_single_device(self.device)
            challenge(spec, link.exchange)
        except (LinkError, RuntimeError) as error:
            link.close()
            raise LinkError(f"building link {spec.name}: {error}") from None
        supervisor.built()
        return link


class Supervisor:
    """Aborts the group of a link once: when the link is given up, or when it is not built in time."""

    def __init__(
        self, spec: LinkSpec, group: NcclGroup, build_timeout_s: float, threads: DeviceThreads
    ) -> None:
        self._store = spec.store
        self._name = spec.name
        self._group = group
        self._timer = threading.Timer(build_timeout_s, spec.store.abort, ("it took too long to build",))
        self._timer.daemon = True
        self._timer.start()
        self._thread = threads.start(f"supervisor {spec.name}", self._run)

    @property
    def given_up(self) -> str | None:
        """Why the link was given up."""
        return self._store.aborted

    def built(self) -> None:
        """Stop the clock of the building."""
        self._timer.cancel()

    def abort(self, reason: str) -> None:
        """Abort the group and wait until that is done. Any thread, any number of times."""
        self._timer.cancel()
        self._store.abort(reason)
        self._thread.join()

    def _run(self) -> None:
        self._store.wait_aborted()
        try:
            self._group.abort()
        except RuntimeError as error:  # the communicator may be half built; its ops have failed all the same
            log.warn("nccl_abort_failed", link=self._name, reason=error)


class NcclLink:
    """One NCCL communicator of two ranks."""

    def __init__(
        self,
        spec: LinkSpec,
        group: NcclGroup,
        supervisor: Supervisor,
        device: torch.device,
        op_timeout_s: float,
    ) -> None:
        self._rank = spec.rank
        self._store = spec.store
        self._group = group
        self._supervisor = supervisor
        self._ring = spec.ring
        self.max_arrivals = spec.ring.num_slots
        self._device = device
        self._op_timeout_s = op_timeout_s

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> NcclOp:
        self._store.post(_header_of(seq), header)
        return self._start(self._group.send, slot.payload(nbytes))

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        return receive_into(
            self._ring,
            lambda slot: NcclReceive(
                self._start(self._group.recv, slot.payload(nbytes)), self._store, seq, slot
            ),
        )

    def abort(self) -> None:
        self._supervisor.abort("aborted")

    def close(self) -> None:
        self._supervisor.abort("closed")

    def exchange(self, turn: int, ours: bytes) -> bytes:
        """Swap bytes with the peer, one direction after the other: both sending first would wait forever."""
        outgoing = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(self._device)
        incoming = torch.zeros(NONCE_NBYTES, dtype=torch.uint8, device=self._device)
        if self._rank == RECEIVER:
            self._start(self._group.send, outgoing).wait(block=True)
            self._start(self._group.recv, incoming).wait(block=True)
        else:
            self._start(self._group.recv, incoming).wait(block=True)
            self._start(self._group.send, outgoing).wait(block=True)
        return bytes(incoming.cpu().numpy())

    def _start(self, op: Callable[[list[torch.Tensor], int, int], Work], buffer: torch.Tensor) -> NcclOp:
        try:
            return NcclOp(op([buffer], 1 - self._rank, 0), buffer, self._supervisor, self._op_timeout_s)
        except RuntimeError as error:
            raise LinkError(str(error)) from None


class NcclOp:
    """A send or receive on the communicator's stream. A failure aborts the link, so that no kernel has the buffer."""

    def __init__(self, work: Work, buffer: torch.Tensor, supervisor: Supervisor, timeout_s: float) -> None:
        self._work = work
        self._buffer = buffer
        self._supervisor = supervisor
        self.timeout_s = timeout_s
        self._failure: str | None = None
        self._done = False

    def wait(self, *, block: bool) -> bool:
        """The deadline counts from the first wait, as on gloo."""
        deadline = time.monotonic() + self.timeout_s
        while self._failure is None and not self._done:
            try:
                if self._work.is_completed():
                    self._complete()
                elif self._supervisor.given_up is not None:
                    self._failure = self._supervisor.given_up
                elif not block:
                    return False
                elif time.monotonic() >= deadline:
                    self._failure = f"timed out after {self.timeout_s:g} s"
                else:
                    time.sleep(_POLL_S)
            except RuntimeError as error:
                self._failure = str(error)
        if self._failure is not None:
            self._failure = self._supervisor.given_up or self._failure  # NCCL only says that it was aborted
            self._supervisor.abort(self._failure)
            raise LinkError(self._failure)
        return True

    def _complete(self) -> None:
        error = self._work.exception()
        if error is not None:
            self._failure = str(error)
        else:
            self._work.wait()  # does not block: orders this thread's stream after the op
            self._done = True


class NcclReceive:
    """A payload, and the header that comes over the control connection before or after it."""

    def __init__(self, op: NcclOp, store: LinkStore, seq: int, slot: Slot) -> None:
        self._op = op
        self._store = store
        self._seq = seq
        self._slot = slot
        self._has_header = False

    def wait(self, *, block: bool) -> bool:
        if not self._op.wait(block=block):
            return False
        if not self._has_header:
            try:
                self._slot.header = self._store.take(_header_of(self._seq), self._op.timeout_s)
            except DistStoreError as error:
                raise LinkError(str(error)) from None
            self._has_header = True
        return True


def _header_of(seq: int) -> str:
    return f"header/{seq}"
