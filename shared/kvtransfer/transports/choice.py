"""What carries the KV pages of a pair of nodes: chosen for each pair when they meet, from what both offer.

sender ── PeerHello(transports, place) ──▶ receiver, which takes the best that both can use
       ◀── LinkOpen(transport) ──────────  or answers Refused, naming the field
both build the link; if that fails, or its first chunk does not arrive intact, the next link of the pair uses the next
transport
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared import log
from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError, PeerMismatch
from shared.kvtransfer.link import LinkFactory, LinkRunner
from shared.kvtransfer.transports.common import ThreadRunner
from shared.protocol.transfer_messages import Place

if TYPE_CHECKING:
    from shared.kvtransfer.transports.cuda.cuda_runtime import CudaRuntime

HOST_SLOT_NBYTES = 4 << 20
GPU_SLOT_NBYTES = 128 << 20
"""A GPU copies 32 MiB within itself in 21 us (H200), and a chunk costs each host 100 us or more."""
BEST_FIRST = ("cuda-ipc", "shm", "nccl", "gloo")
ON_A_CPU = ("shm", "gloo")
"""What `--kv-transfer auto` tries, the best first."""
NUM_LINKS_WITH_MEMORY = 4
"""Links for which a node on a GPU sets memory aside: how many there will be is not known when it starts."""
NOWHERE = Place()


@dataclass(frozen=True)
class Transports:
    """What one node offers: `factories` by the name of the transport, the best first."""

    factories: Mapping[str, LinkFactory]
    runner: LinkRunner
    place: Place = NOWHERE
    slot_nbytes: int = HOST_SLOT_NBYTES
    """The size of a staging slot of this node: the most bytes of pages in one chunk."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Transports that cannot work here, and why."""

    def in_common(self, theirs: Sequence[str], their_place: Place) -> tuple[list[str], dict[str, str]]:
        """What this receiving node and a sender can both use, the best first, and why not the others.

        PeerMismatch: there is nothing.
        """
        usable: list[str] = []
        passed_over = {
            name: f"not on the receiving node: {reason}" for name, reason in self.unavailable.items()
        }
        for name, factory in self.factories.items():
            obstacle = factory.obstacle(self.place, their_place)
            if name not in theirs:
                passed_over[name] = "the sending node does not offer it"
            elif obstacle is not None:
                passed_over[name] = obstacle
            else:
                usable.append(name)
        if not usable:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            if {"tcp", "tls"} <= {*self.factories, *theirs}:
                why += "; --kv-transfer tcp needs --kv-tls on both nodes or on neither"
            offers = (
                f"the receiving node offers {'/'.join(self.factories)}, the sending node {'/'.join(theirs)}"
            )
            raise PeerMismatch(f"kv_transfer: {offers} ({why})")
        return usable, passed_over


def better_than(transport: str, passed_over: Mapping[str, str]) -> dict[str, str]:
    """Of the transports that were passed over, those that are better than `transport`, and why."""
    better = takewhile(lambda name: name != transport, BEST_FIRST)
    return {name: passed_over[name] for name in better if name in passed_over}


def slot_nbytes(options: TransferOptions, device: torch.device) -> int:
    """The size of a staging slot of a node whose KV pages are on `device`."""
    return options.slot_nbytes or (GPU_SLOT_NBYTES if device.type == "cuda" else HOST_SLOT_NBYTES)


def links_nbytes(options: TransferOptions, device: torch.device) -> int:
    """Device memory that a node sets aside for its links.

    A link has its slots there (cuda-ipc, nccl), and what one copy takes: pages on their way to a slot in host memory
    (shm, gloo).
    """
    if device.type == "cpu":
        return 0
    return NUM_LINKS_WITH_MEMORY * (options.num_slots + 1) * slot_nbytes(options, device)


def place_of(device: torch.device) -> Place:
    """Where this process and its KV pages are."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return Place(host_identity(), gpu)


def host_identity() -> str:
    """The same in two processes that can share memory over an abstract Unix socket: one boot, one network
    namespace, one user. Empty where there is no such thing.

    Containers of one machine have the boot in common but each its own network namespace, unless they were given
    the host's. Clones of a virtual machine may agree by mistake: then the link cannot be built.
    """
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # no /proc here
        return ""
    return f"{boot}/{network}/{os.getuid()}"


def make_transports(
    options: TransferOptions,
    device: torch.device,
    place_of: Callable[[torch.device], Place] = place_of,
    threads: DeviceThreads | None = None,
) -> Transports:
    """What `--kv-transfer` offers for KV pages on `device`. ConfigError: it cannot work here.

    Each backend is imported only when it is offered. Links run on `threads`, which are those of `device` by default.
    """
    threads = threads or DeviceThreads.of(device)
    names: tuple[str, ...] = (options.backend,)
    if options.backend == "auto":
        names = BEST_FIRST if device.type == "cuda" else ON_A_CPU
    elif options.kv_tls:
        names = ("tls",)
    factories: dict[str, LinkFactory] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        try:
            factories[name] = _new_factory(name, options, device, threads)
        except ConfigError as error:
            if options.backend != "auto":
                raise
            log.event("transport_unavailable", transport=name, reason=error)
            unavailable[name] = str(error)
    return Transports(
        factories,
        ThreadRunner(threads),
        place_of(device),
        slot_nbytes(options, device),
        unavailable,
    )


def _new_factory(
    name: str, options: TransferOptions, device: torch.device, threads: DeviceThreads
) -> LinkFactory:
    if name not in ("nccl", "gloo") and sys.platform != "linux":
        raise ConfigError(f"--kv-transfer {name} needs Linux: what its sockets can do")
    match name:
        case "cuda-ipc":
            from shared.kvtransfer.transports.cuda.cuda_ipc import CudaIpcLinkFactory

            return CudaIpcLinkFactory(options, _cuda_runtime(name, device, threads), threads)
        case "shm":
            from shared.kvtransfer.transports.shm import ShmLinkFactory

            runtime = None if device.type == "cpu" else _cuda_runtime(name, device, threads)
            return ShmLinkFactory(options, threads, runtime)
        case "nccl":
            from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory, nccl_groups

            return NcclLinkFactory(options, device, nccl_groups(options, device), threads)
        case "gloo":
            from shared.kvtransfer.transports.gloo import GlooLinkFactory

            return GlooLinkFactory(options, device, threads)
        case _:  # tcp or tls
            from shared.kvtransfer.transports.tcp import TcpLinkFactory

            return TcpLinkFactory(options, device, threads)


def _cuda_runtime(name: str, device: torch.device, threads: DeviceThreads) -> CudaRuntime:
    if device.type != "cuda":
        raise ConfigError(f"--kv-transfer {name} is for KV pages on a GPU; they are on {device}")
    from shared.kvtransfer.transports.cuda.cuda_runtime import CudaRuntime

    try:
        return CudaRuntime(device, threads)
    except (LinkError, AttributeError) as error:
        raise ConfigError(f"--kv-transfer {name}: {error}") from None
