"""What carries the KV pages of a pair of nodes: chosen for each pair when they meet, from what both offer.

sender ── PeerHello(transports, host) ──▶ receiver, which takes the best that both can use
       ◀── LinkOpen(transport) ──────────  or answers Refused, naming the field
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared import log
from shared.config import TransferOptions
from shared.errors import ConfigError, TransportMismatch
from shared.kvtransfer.link import LinkFactory


@dataclass(frozen=True)
class Transports:
    """What one node offers: `factories` by the name of the transport, the best first. `host`: see `host_identity`."""

    factories: Mapping[str, LinkFactory]
    host: str = ""

    def in_common(self, theirs: Sequence[str], their_host: str) -> list[str]:
        """What this receiving node and a sender can both use, the best first. TransportMismatch: nothing."""
        both = [name for name in self.factories if name in theirs]
        if not both:
            raise TransportMismatch(
                f"the receiving node offers {'/'.join(self.factories)}, the sending node {'/'.join(theirs)}"
            )
        one_host = bool(self.host) and self.host == their_host
        usable = [name for name in both if name != "shm" or one_host]
        if not usable:
            raise TransportMismatch(
                f"shm is for nodes of one host; the receiver is on {self.host!r}, the sender on {their_host!r}"
            )
        return usable


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


def make_transports(options: TransferOptions, device: torch.device) -> Transports:
    """What `--kv-transfer` offers for KV pages on `device`. ConfigError: it cannot work here.

    Each backend is imported only when it is offered.
    """
    match options.backend:
        case "auto":
            names = ["shm", "gloo"] if device.type == "cpu" else ["gloo"]
        case "gloo" | "shm" | "nccl":
            names = [options.backend]
        case _:
            raise ConfigError(f"unknown transfer backend {options.backend!r}: use auto, gloo, shm or nccl")
    factories = {}
    for name in names:
        try:
            factories[name] = _new_factory(name, options, device)
        except ConfigError as error:
            if options.backend != "auto":
                raise
            log.event("transport_unavailable", transport=name, reason=error)
    return Transports(factories, host_identity())


def _new_factory(name: str, options: TransferOptions, device: torch.device) -> LinkFactory:
    match name:
        case "shm":
            if sys.platform != "linux":
                raise ConfigError("--kv-transfer shm needs Linux: memfd, and sockets without names in files")
            from shared.kvtransfer.transports.shm import ShmLinkFactory

            return ShmLinkFactory(options, device)
        case "nccl":
            from shared.kvtransfer.transports.nccl import NcclLinkFactory

            return NcclLinkFactory(options, device)
        case _:
            from shared.kvtransfer.transports.gloo import GlooLinkFactory

            return GlooLinkFactory(options, pin_memory=device.type == "cuda")
