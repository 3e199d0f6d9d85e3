"""Links over host memory that two processes of one host share. Staging slots are memfds (`shared_memory`).

Where pages are on GPUs the slots are registered with CUDA, so that both processes copy from and to them at the speed
of the bus.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shared import log
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import Copier, Driver, Link, LinkSpec, Stepped
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import ThreadDriver, not_one_host, thread_copier
from shared.kvtransfer.transports.shared_memory import SharedSlot, map_slot
from shared.kvtransfer.transports.unix_link import build_unix_link
from shared.protocol.transfer_messages import Place

if TYPE_CHECKING:
    from shared.kvtransfer.transports.cuda.cuda_runtime import Runtime


class ShmLinkFactory:
    """Builds links to processes of this host; each is stepped by a thread of its own. On a GPU it has a `runtime`."""

    def __init__(
        self, options: TransferOptions, threads: DeviceThreads, runtime: Runtime | None = None
    ) -> None:
        try:
            SharedSlot(1)
        except LinkError as error:
            raise ConfigError(f"--kv-transfer shm: {error}") from None
        self._options = options
        self._threads = threads
        self._runtime = runtime

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return not_one_host(ours, theirs)

    def drive(self, name: str, loop: Stepped) -> Driver:
        return ThreadDriver(name, loop, self._threads)

    def new_copier(self, name: str) -> Copier:
        return thread_copier(name, self._threads)

    def new_slot(self, nbytes: int) -> Slot:
        runtime = self._runtime
        slot = SharedSlot(nbytes)
        if runtime is not None:
            runtime.register(slot.buffer)
            weakref.finalize(slot, runtime.unregister, slot.buffer).atexit = False
        return slot

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "a socket is waited for by blocking"
        return build_unix_link(spec, self._options, MemfdSharing(self._runtime), on_dead, self._threads)


class MemfdSharing:
    """Passes the memfd of a slot, which the receiver maps. A payload may be read as soon as its record is there."""

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime
        self._registered: list[torch.Tensor] = []

    def show(self, slot: Slot) -> tuple[bytes, int]:
        assert isinstance(slot, SharedSlot)
        return b"", slot.descriptor

    def see(self, shown: bytes, descriptor: int) -> Slot:
        memory = map_slot(descriptor, writable=self._runtime is not None)
        if self._runtime is not None:
            self._runtime.register(memory)
            self._registered.append(memory)
        return Slot(memory)

    def close(self) -> None:
        for memory in self._registered:
            assert self._runtime is not None
            try:
                self._runtime.unregister(memory)
            except LinkError as error:  # the device is lost, and with it this process
                log.warn("shm_slot_stays_pinned", reason=error)
        self._registered.clear()
