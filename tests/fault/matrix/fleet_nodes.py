"""The nodes of the matrix's fleet: how a test holds one, and what they compute with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import load_library
from shared.timeline import Role
from tests.fault.matrix.cells import Transport
from tests.fault.matrix.held_node import run_held
from tests.fault.matrix.holding import Order, Sight, write
from tests.fault.matrix.namespaces import Namespaces
from tests.forked import Forked
from tests.modelzoo import make_model
from tests.patience import until
from tests.processes import HOST, Child, Node, free_port
from tests.quantized_models import compressed_tensors, quantize_folder


@dataclass(frozen=True)
class Computing:
    """What the nodes of a fleet compute with."""

    flags: tuple[str, ...]
    logprob_atol: float
    """0 where a token has the same bits however it is computed."""


OVER_HOSTILE_NETWORKS = ("tcp", "tls")
"""Transports of `--kv-transfer tcp`, whose fleet has a key."""
NATIVE = Computing(("--dtype", "bfloat16", "--attention-backend", "native"), 0)
TORCH = Computing((), 1e-4)
"""In float32 torch adds in another order in a prefill than in a decode step."""


def link_flags(transport: str, kv_port: int) -> tuple[str, ...]:
    """What a node is told so that its pages travel over `transport`; only tcp and tls have a `kv_port`."""
    if transport not in OVER_HOSTILE_NETWORKS:
        return ("--kv-transfer", transport)
    tls = ("--kv-tls",) if transport == "tls" else ()
    return ("--kv-transfer", "tcp", "--kv-port", str(kv_port), *tls)


def make_fleet_key(folder: Path) -> tuple[str, str]:
    """The flag of all processes of a fleet that has a key."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fleet.key"
    path.write_text("the secret of these hosts")
    return ("--fleet-key", str(path))


class HeldNode(Node):
    """A node of `run_held`, and what it is told."""

    def __init__(
        self,
        folder: Path,
        role: str,
        name: str,
        *flags: str,
        transport: str,
        network: Namespaces | None = None,
    ) -> None:
        host = network.address(name) if network is not None else HOST
        links = link_flags(transport, free_port())
        super().__init__(folder, role, name, "--host", host, "--insecure", *links, *flags)
        self.address = f"{host}:{self.port}"
        self._namespace = network.name_of(name) if network is not None else ""
        self._order_path = folder / f"{name}.order"
        self._flags = self.argv[self.argv.index("--port") :]
        self._number = 0
        self.plants: tuple[str, ...] = ()

    def _spawn(self) -> Child:
        args = (Role(self.role), self._order_path, self._flags, self._namespace)
        return Forked(self.log_path, run_held, *args)

    def order(self, **fields: Any) -> None:
        """Give an order, which takes the place of the last one; without `fields` the node is let go.

        A node that runs has read it on return, or has ended. One that is stopped is continued before it gets one.
        """
        self._number += 1
        write(self._order_path, Order(number=self._number, plants=self.plants, **fields))
        read_path = self._order_path.with_suffix(".read")
        until(
            lambda: not self.alive or (read_path.exists() and read_path.read_text() == str(self._number)),
            "the order is read",
        )

    @property
    def sight(self) -> Sight | None:
        """What it has seen since the latest order."""
        path = self._order_path.with_suffix(".seen")
        sight = msgspec.json.decode(path.read_bytes(), type=Sight) if path.exists() else None
        return sight if sight is not None and sight.number == self._number else None


@functools.cache
def computing_here() -> Computing:
    """The native kernels where this machine has them, else torch."""
    try:
        load_library()
    except NativeUnavailable:
        return TORCH
    return NATIVE


class Model(StrEnum):
    """What a fleet serves."""

    DENSE = "dense"
    """In bf16."""
    W8A8 = "w8a8"
    """The same model in int8, and its KV too."""
    MIXTURE = "mixture"
    """Experts in int4, and a window of 24 tokens in every second layer."""


MODELS = {
    Transport.SHM: Model.DENSE,
    Transport.GLOO: Model.W8A8,
    Transport.TCP: Model.MIXTURE,
    Transport.TLS: Model.W8A8,
}
"""What the fleet over each transport serves."""


@dataclass(frozen=True)
class Served:
    """A model as nodes are told of it."""

    folder: Path
    flags: tuple[str, ...] = ()


def make_served(folder: Path, model: Model, **overrides: int) -> Served:
    """Write a model; `overrides` are config.json's fields."""
    architecture = "gptoss" if model is Model.MIXTURE else "llama"
    dense = make_model(folder / "dense", architecture, dtype="bfloat16", num_hidden_layers=4, **overrides)
    match model:
        case Model.DENSE:
            return Served(dense)
        case Model.W8A8:
            w8a8 = quantize_folder(dense, folder / "w8a8", compressed_tensors(8, activations=True))
            return Served(w8a8, ("--kv-cache-dtype", "int8"))
        case Model.MIXTURE:
            return Served(dense, ("--quantization", "int4"))
