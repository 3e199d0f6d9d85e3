"""Data links between staging slots in the memory of a FakeGpu, by the rules of the fake link.

An op reads and writes its slot when the network says so, behind what its thread has queued and in no other stream's
order: what other streams do with the slot must be done when a link is given it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from shared.kvtransfer.link import Copier, Stepped
from shared.kvtransfer.staging import Slot
from tests.fake_link import FakeLinkRunner
from tests.fake_network import FakeNetwork
from tests.sim.streams.device import FakeGpu, FakeStream, Memory
from tests.sim.streams.tensors import DEVICE, DeviceTensor


@dataclass(frozen=True)
class GpuLinkRunner(FakeLinkRunner):
    """Each link and each copier has a stream of its own."""

    gpu: FakeGpu

    def drive(self, name: str, link: Stepped) -> Callable[[float], bool]:
        return super().drive(name, OnStream(link, self.gpu.new()))

    def new_copier(self, name: str) -> Copier:
        return LaterCopier(self.gpu.new(), self.network, self.party)


@dataclass(frozen=True)
class DeviceMemory:
    """Staging slots in device memory."""

    gpu: FakeGpu

    def new_slot(self, nbytes: int) -> Slot:
        return Slot(torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE))

    def address_of(self, buffer: torch.Tensor) -> Address:
        assert isinstance(buffer, DeviceTensor)
        self.gpu.current().synchronize()
        return Address(self.gpu, buffer.block.memory, buffer.backing)


@dataclass(frozen=True)
class Address:
    """Device memory as an op of a link knows it: it does not keep the memory allocated."""

    gpu: FakeGpu
    memory: Memory
    content: torch.Tensor

    def numel(self) -> int:
        return self.content.numel()

    def copy_(self, source: Address) -> None:
        source._use()
        self._use()
        self.content.copy_(source.content)

    def fill_(self, value: int) -> None:
        self._use()
        self.content.fill_(value)

    def _use(self) -> None:
        if self.memory.is_given_back:
            self.gpu.found("an op of a link uses a slot after its memory was freed")


@dataclass(frozen=True)
class OnStream:
    """A link that is stepped on a stream."""

    link: Stepped
    stream: FakeStream

    @property
    def finished(self) -> bool:
        return self.link.finished

    def step(self, *, block: bool) -> bool:
        with self.stream.use():
            return self.link.step(block=block)


@dataclass(frozen=True)
class LaterCopier:
    """Runs copies as events of the network, since a caller of `submit` may hold locks."""

    stream: FakeStream
    network: FakeNetwork
    party: str

    def submit(self, copy: Callable[[], None], /) -> None:
        self.network.schedule_for(self.party, self.network.clock.now, partial(self._copy, copy))

    def shutdown(self, wait: bool = True) -> None: ...

    def _copy(self, copy: Callable[[], None]) -> None:
        with self.stream.use():
            copy()
