"""A node's share of the memory of its device, from the start of loading until the node is ready (ADR 32)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from shared.engine.engine_shape import MIN_PAGES, EngineShape, gib
from shared.engine.forward_stream import ForwardStream
from shared.engine.model_runner import ModelBackend, ModelRunner
from shared.errors import ConfigError
from shared.kvcache.windowed_pool import AnyKVPool

CPU_KV_CAP_BYTES = 2 << 30
"""Largest KV pool that is chosen by itself on a CPU, where other processes share the memory."""
CPU_FRACTION = 0.8


@dataclass(frozen=True)
class BoundModel:
    """A model bound to a KV pool, and the stream that its forwards run on. Closing the stream ends both."""

    pool: AnyKVPool
    backend: ModelBackend
    runner: ModelRunner
    stream: ForwardStream


OnProgress = Callable[[str, float], None]
"""(what is being done, fraction done)"""
Bind = Callable[[int], BoundModel]
"""Binds the model to a new pool of so many pages, the scratch page not counted."""


class DeviceShare(Protocol):
    """The steps of a start that differ between devices, in the order in which they are called."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Surrounds all other steps: no other node measures or takes memory of the device meanwhile."""
        ...

    def await_room(self) -> None:
        """Wait until there is room for the model. Raises ConfigError, with the numbers, when there is none."""
        ...

    def measure(self, bind: Bind) -> None:
        """Find out what the loaded model needs beside the KV pool."""
        ...

    def num_pages(self) -> int:
        """Pages of the KV pool without the scratch page. Raises ConfigError, with the numbers, for less than two."""
        ...

    def warm_up(self, bound: BoundModel) -> None:
        """Run every shape of forward once, and test the results. Raises ConfigError."""
        ...

    @property
    def memory_mib(self) -> Mapping[str, int]:
        """What was measured, for the log."""
        ...

    def close(self) -> None:
        """Give the share back: the engine is closed."""
        ...


class HostShare:
    """A CPU's memory. Nothing is measured, since the KV pool is capped and the system has the rest.

    Nothing is warmed up or tested either: a CPU compiles no kernel at its first forward, `make test` has run the
    kernels of every instruction set that it could, and a forward of a large model takes seconds.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self.memory_mib: dict[str, int] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Other nodes may load at the same time."""
        yield

    def await_room(self) -> None:
        """Refuse weights that are larger than all memory."""
        if self._shape.weights_nbytes > (total := host_memory()):
            raise ConfigError(
                f"the weights of the model take {gib(self._shape.weights_nbytes)}, and this machine has {gib(total)}"
            )

    def measure(self, bind: Bind) -> None:
        """Do nothing."""

    def num_pages(self) -> int:
        """From --max-total-tokens, or from the memory that is free now that the weights are loaded."""
        shape, fraction = self._shape, self._shape.cache.mem_fraction_static
        given = shape.given_pages(host_memory())
        if given is not None:
            return given
        fraction = CPU_FRACTION if fraction is None else fraction
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = min(int(free * fraction), CPU_KV_CAP_BYTES)
        num_pages = shape.useful_pages(budget)
        if num_pages < MIN_PAGES:
            raise ConfigError(
                f"--mem-fraction-static {fraction} leaves {budget} bytes for KV on {shape.device}, and a page takes "
                f"{shape.page_nbytes}; raise it, or choose a smaller --page-size"
            )
        return num_pages

    def warm_up(self, bound: BoundModel) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the system takes the memory back."""


def host_memory() -> int:
    """Bytes of memory that this machine has, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_share(shape: EngineShape, on_progress: OnProgress) -> DeviceShare:
    """The share of the device that the shape names."""
    if shape.device.type != "cuda":
        return HostShare(shape)
    from shared.engine.cuda.gpu_share import gpu_share

    return gpu_share(shape, on_progress)
