from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import NodeToRouter, RouterToNode, Struct
from shared.protocol.resolver import Resolver
from shared.protocol.security import FleetKey
from tests.patience import PATIENCE_S


class Party:
    """A ControlThread and all it was told, in order."""

    def __init__(
        self,
        name: str,
        key: FleetKey | None,
        resolver: Resolver | None = None,
        **limits: Any,
    ) -> None:
        self.name = name
        self.control = ControlThread(key, resolver, **limits)
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.connected: queue.Queue[str] = queue.Queue()
        self.disconnected: queue.Queue[tuple[str, str]] = queue.Queue()
        self.closed = False
        self._dialled: set[str] = set()

    def listen(self, port: int = 0, *, admit: bool = True) -> str:
        """As a node does; returns where to dial."""
        port = self.control.bind("127.0.0.1", port)
        self.control.start()
        if admit:
            self.admit()
        return f"tcp://127.0.0.1:{port}"

    def admit(self) -> None:
        self.control.admit({"router": Handlers(msgspec.msgpack.Decoder(RouterToNode), self._on_message)})

    def start(self) -> Party:
        """As a router does."""
        self.control.start()
        return self

    def dial(self, peer: str, address: str, *, kind: str = "router") -> None:
        self._dialled.add(peer)
        self.control.dial(
            peer,
            address,
            f"{kind}|{self.name}",
            Handlers(msgspec.msgpack.Decoder(NodeToRouter), self._on_message),
            self.connected.put,
            lambda peer, reason: self.disconnected.put((peer, reason)),
        )

    def dialled(self, peer: str, address: str) -> None:
        """Dial, and wait until the peer has taken the connection."""
        self.dial(peer, address)
        assert self.connected.get(timeout=PATIENCE_S) == peer

    def send(self, to: str, message: Struct) -> None:
        self.control.send(to, message, dialled=to in self._dialled)

    def hear(self) -> tuple[str, Any]:
        return self.heard.get(timeout=PATIENCE_S)

    def _on_message(self, peer: str, message: Any) -> None:
        self.heard.put((peer, message))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.control.close()


class SlowNames:
    """A name server that answers for `slow.example` when it is told to, and for no name that is `unknown`."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.unknown: set[str] = {"no.example"}
        self.asked: queue.Queue[str] = queue.Queue()

    def __call__(self, host: str, port: int, *, type: int) -> list[tuple[object, ...]]:
        self.asked.put(host)
        if host.startswith("slow"):
            assert self.answers.wait(PATIENCE_S)
        if host in self.unknown:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, type, 0, "", ("::1", port, 0, 0)),
            (socket.AF_INET, type, 0, "", ("127.0.0.1", port)),
        ]


@pytest.fixture
def names() -> Iterator[SlowNames]:
    names = SlowNames()
    yield names
    names.answers.set()


MakeParty = Callable[..., Party]


@pytest.fixture
def party() -> Iterator[MakeParty]:
    parties: list[Party] = []

    def make(
        name: str, key: FleetKey | None = None, resolver: Resolver | None = None, **limits: Any
    ) -> Party:
        parties.append(Party(name, key, resolver, **limits))
        return parties[-1]

    yield make
    for each in parties:
        each.close()
