"""Links between two GPU processes of one host, also on one GPU. The receiver reads device memory of the sender.

Slots come from cudaMalloc and are mapped by the receiver (CUDA IPC). A record is sent when its gather is done,
since the digest goes with it, and a slot is released when its scatter is done. So the hosts order the work of the two
processes, which share no event of CUDA. With the first record of a slot goes the handle of its memory, and one end
of a pipe, the *witness*: it closes when the receiver has unmapped the slot, or is dead. CUDA leaves undefined what
becomes of mappings of freed memory, so a slot is freed only then.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shared import log
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import Link, LinkSpec
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import not_one_host
from shared.kvtransfer.transports.cuda.cuda_runtime import CudaRuntime
from shared.kvtransfer.transports.unix_link import build_unix_link
from shared.protocol.transfer_messages import Place

_ALLOCATION_NBYTES = 2 << 20
"""cudaMalloc puts smaller blocks into one allocation of this size, and a handle is one of the whole allocation."""


@dataclass(frozen=True)
class CudaIpcLinkFactory:
    """Builds links between processes of this host that have their pages on GPUs."""

    options: TransferOptions
    runtime: CudaRuntime
    threads: DeviceThreads

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return not_one_host(ours, theirs) or (None if theirs.gpu else "the sending node has no GPU")

    def new_slot(self, nbytes: int) -> Slot:
        return IpcSlot(self.runtime, nbytes)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "a socket is waited for by blocking"
        sharing = IpcSharing(self.runtime, self.options.op_timeout_s, self.threads)
        return build_unix_link(spec, self.options, sharing, on_dead, self.threads)


class IpcSlot(Slot):
    """A staging slot in device memory that another process can map. It is freed with the last reference to it."""

    def __init__(self, runtime: CudaRuntime, nbytes: int) -> None:
        self.address = runtime.malloc(-(-nbytes // _ALLOCATION_NBYTES) * _ALLOCATION_NBYTES)
        # The memory of a process that ends is freed by the driver, which may have shut down before finalizers run.
        weakref.finalize(self, runtime.free, self.address).atexit = False
        super().__init__(runtime.tensor(self.address, nbytes))


class IpcSharing:
    """One end: the slots that were shown and their witnesses, or the mappings of the slots that were seen."""

    def __init__(self, runtime: CudaRuntime, timeout_s: float, threads: DeviceThreads) -> None:
        self._runtime = runtime
        self._threads = threads
        self._timeout_s = timeout_s
        self._shown: dict[IpcSlot, int] = {}
        """Slots, and the ends of pipes that hang up when the peer has let go of them."""
        self._passed: list[int] = []
        """Of the newest slot the other end, which this process holds until the record has been sent."""
        self._seen: dict[Slot, int] = {}
        """Slots, and the witness to close when they are unmapped."""

    def show(self, slot: Slot) -> tuple[bytes, int]:
        assert isinstance(slot, IpcSlot)
        shown = self._runtime.ipc_handle(slot.address)
        self._close_passed()
        self._shown[slot], witness = os.pipe()
        self._passed.append(witness)
        return shown, witness

    def see(self, shown: bytes, descriptor: int) -> Slot:
        try:
            slot = Slot(self._runtime.open(shown))
        except (LinkError, RuntimeError) as error:  # RuntimeError: of torch
            os.close(descriptor)
            raise LinkError(f"the peer's slot cannot be mapped: {error}") from None
        self._seen[slot] = descriptor
        return slot

    def close(self) -> None:
        seen, self._seen = self._seen, {}
        for slot, witness in seen.items():
            try:
                self._runtime.close(slot.buffer.data_ptr())
            except LinkError as error:  # the device is lost, and with it this process
                log.warn("kv_slot_stays_mapped", reason=error)
            os.close(witness)
        self._close_passed()
        if not self._let_go(self._timeout_s):
            # The peer is stopped, not dead. Its kernels may read these slots, however long that takes.
            log.warn("kv_slots_held_by_peer", num_slots=len(self._shown))
            self._threads.start("kv slots", partial(self._let_go, None))

    def _let_go(self, timeout_s: float | None) -> bool:
        """Drop each slot that was shown when its witness hangs up. False: some did not in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for slot, end in list(self._shown.items()):
            hang_up = select.poll()
            hang_up.register(end, select.POLLHUP)
            left_ms = None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))
            if hang_up.poll(left_ms):
                os.close(end)
                del self._shown[slot]
        return not self._shown

    def _close_passed(self) -> None:
        while self._passed:
            os.close(self._passed.pop())
