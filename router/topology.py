"""The flags for the nodes that a router starts or joins."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from shared.protocol.messages import Role

MAX_LOCAL_NODES = 64
DEFAULT_PORTS = {Role.PREFILL: 7100, Role.DECODE: 7200}


_LOCAL = re.compile(r"(\d{1,3})P(\d{1,3})D", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+)(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class LocalTopology:
    """How many nodes of each role are started on this machine."""

    num_prefill: int
    num_decode: int

    def node_ids(self) -> list[tuple[Role, str]]:
        """Role and name of each."""
        counts = ((Role.PREFILL, self.num_prefill), (Role.DECODE, self.num_decode))
        return [(role, f"{role}-{i}") for role, count in counts for i in range(count)]

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


def parse_local(text: str) -> LocalTopology:
    """An argparse type: `2P1D`. `0P1D` is one node that does both; `none` waits for nodes that join."""
    if text == "none":
        return LocalTopology(0, 0)
    match = _LOCAL.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1P1D (prefill nodes, decode nodes)")
    topology = LocalTopology(int(match[1]), int(match[2]))
    if topology.num_decode == 0:
        raise argparse.ArgumentTypeError(f"{text}: at least one decode node is needed")
    if topology.num_prefill + topology.num_decode > MAX_LOCAL_NODES:
        raise argparse.ArgumentTypeError(f"{text}: at most {MAX_LOCAL_NODES} nodes")
    return topology


def parse_address(role: Role, text: str) -> str:
    """An argparse type: HOST[:PORT] as `tcp://host:port`."""
    try:
        return address_of(role, text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def address_of(role: Role, text: str) -> str:
    """`tcp://host:port` of HOST[:PORT]; an IPv6 address has brackets. Raises ValueError."""
    match = _ADDRESS.fullmatch(text.removeprefix("tcp://"))
    port = int(match["port"] or DEFAULT_PORTS[role]) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ValueError(f"{text!r} is not HOST[:PORT]")
    return f"tcp://{match['host']}:{port}"
