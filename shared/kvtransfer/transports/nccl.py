"""Links over NCCL pair groups: staging slots lie in device memory and are sent from there.

NOT YET RUN ON GPUS. Written from the sources of torch 2.11 to 2.13; only the choice of options is tested.
Two ranks on one GPU are refused by NCCL: use gloo there.

What differs from gloo:
- receives under way occupy the communicator in order, so there is no canary: a dead peer is noticed by the
  control connection, by pings, or by an op's timeout, and `abort` frees the thread that waits;
- `wait` only orders the current stream, so an op polls for completion and keeps the deadline itself;
- payloads are digested on the device, with kernels of torch;
- the interface is NCCL's choice: `bind_host` does not apply, set NCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from shared.config import TransferOptions
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import RECEIVER, Copier, Driver, Link, LinkSpec, Stepped
from shared.kvtransfer.staging import Slot, SlotRing
from shared.kvtransfer.transports.common import (
    NONCE_NBYTES,
    RingArrival,
    ThreadDriver,
    challenge,
    receive_into,
    thread_copier,
)

_POLL_S = 100e-6


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


class NcclLinkFactory:
    """Builds links between GPUs; each is stepped by a thread that works on a stream of its own."""

    def __init__(self, options: TransferOptions, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(f"--kv-transfer nccl moves KV between GPUs; the KV pages are on {device}")
        if not torch.distributed.is_nccl_available():
            raise ConfigError("--kv-transfer nccl: this build of torch has no NCCL; use gloo")
        for name, value in nccl_environment(options).items():
            os.environ.setdefault(name, value)
        self._options = options
        self._device = device

    def drive(self, name: str, loop: Stepped) -> Driver:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return ThreadDriver(name, loop, torch.cuda.stream(stream))

    def new_copier(self, name: str) -> Copier:
        """On a stream of its own: a gather has ended before its chunk is sent."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return thread_copier(name, lambda: torch.cuda.set_stream(stream))

    def new_slot(self, nbytes: int) -> Slot:
        return Slot(torch.zeros(nbytes, dtype=torch.uint8, device=self._device))

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        """`on_dead` is never called: see the head of this file."""
        assert block, "NCCL builds by blocking"
        from torch.distributed import ProcessGroupNCCL

        group_type: Any = ProcessGroupNCCL
        try:
            nccl_options = group_type.Options()
            configure(nccl_options, self._options)
            group = group_type(spec.store, spec.rank, 2, nccl_options)
            # Without this the first send would build a second communicator.
            group.eager_connect_single_device(self._device)
        except RuntimeError as error:
            raise LinkError(f"building link {spec.name}: {error}") from None
        ring = SlotRing(self._options.num_slots, self._options.slot_nbytes, self.new_slot)
        link = NcclLink(spec, group, ring, self._device, self._options.op_timeout_s)
        try:
            challenge(spec, link.exchange)
        except LinkError:
            link.close()
            raise
        return link


class NcclLink:
    """One NCCL communicator of two ranks."""

    def __init__(
        self, spec: LinkSpec, group: Any, ring: SlotRing, device: torch.device, op_timeout_s: float
    ) -> None:
        self._rank = spec.rank
        self._group = group
        self._ring = ring
        self.max_arrivals = ring.num_slots
        self._device = device
        self._op_timeout_s = op_timeout_s

    def send(self, slot: Slot, nbytes: int, seq: int) -> NcclOp:
        """NCCL has no tags: the order of the calls is the order of the messages."""
        return self._start(self._group.send, slot.message(nbytes))

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        return receive_into(self._ring, nbytes, lambda buffer: self._start(self._group.recv, buffer))

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()

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

    def _start(self, op: Callable[[list[torch.Tensor], int, int], Any], buffer: torch.Tensor) -> NcclOp:
        try:
            return NcclOp(op([buffer], 1 - self._rank, 0), buffer, self._op_timeout_s)
        except RuntimeError as error:
            raise LinkError(str(error)) from None


class NcclOp:
    """A send or receive on the communicator's stream."""

    def __init__(self, work: Any, buffer: torch.Tensor, timeout_s: float) -> None:
        self._work = work
        self._buffer = buffer
        self._timeout_s = timeout_s
        self._failure: str | None = None

    def wait(self, *, block: bool) -> bool:
        """The deadline counts from the first wait, as on gloo."""
        deadline = time.monotonic() + self._timeout_s
        while self._failure is None:
            try:
                if self._work.is_completed():
                    error = self._work.exception()
                    if error is None:
                        self._work.wait()  # does not block: orders this thread's stream after the op
                        return True
                    self._failure = str(error)
                elif not block:
                    return False
                elif time.monotonic() >= deadline:
                    self._failure = f"timed out after {self._timeout_s:g} s"
                else:
                    time.sleep(_POLL_S)
            except RuntimeError as error:
                self._failure = str(error)
        raise LinkError(self._failure)
