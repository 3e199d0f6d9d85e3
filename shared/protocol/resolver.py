"""Host names become numbers here. ZeroMQ would look names up on its only I/O thread, and stop every connection.

A name is looked up anew for every dial, on a thread of its own: the library's look-up can neither be given a
deadline nor be called off, so the caller of `resolve` keeps the deadline.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shared import log
from shared.errors import LinkError

LookUp = Callable[..., list[tuple[Any, ...]]]
"""`socket.getaddrinfo`: the addresses of a host. It raises OSError, or ValueError for a host that is no name."""


class Resolver:
    """Turns `tcp://NAME:PORT` into `tcp://NUMBER:PORT`. May be used by any thread."""

    def __init__(self, look_up: LookUp = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._running: dict[str, Future[tuple[str, ...]]] = {}

    def resolve(self, address: str) -> Future[tuple[str, ...]]:
        """The address with each number that its host has, at least one, IPv4 first; fails with LinkError."""
        answer: Future[tuple[str, ...]] = Future()
        answer.set_running_or_notify_cancel()  # several callers may share it, so none of them can cancel it
        host, port = split_address(address)
        if not host or port is None:
            answer.set_exception(LinkError(f"{address} is not tcp://HOST:PORT"))
        elif _is_number(host):
            answer.set_result((address,))
        else:
            with self._lock:
                if address in self._running:
                    return self._running[address]
                self._running[address] = answer
            look_up = (address, host, port, answer)
            threading.Thread(target=self._run, args=look_up, name="resolve", daemon=True).start()
        return answer

    def _run(self, address: str, host: str, port: int, answer: Future[tuple[str, ...]]) -> None:
        numbers: list[str] = []
        error = None
        try:
            found = self._look_up(host, port, type=socket.SOCK_STREAM)
            numbers = [entry[4][0] for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
        except (OSError, ValueError) as failure:
            error = does_not_resolve(address, getattr(failure, "strerror", None) or str(failure))
        with self._lock:
            del self._running[address]
        if error is not None:
            answer.set_exception(error)
        else:
            hosts = [f"[{number}]" if ":" in number else number for number in dict.fromkeys(numbers)]
            answer.set_result(tuple(f"tcp://{host}:{port}" for host in hosts))


def warn_unless_resolved(host: str, resolver: Resolver) -> None:
    """Log a warning, later, if the name under which others are to reach this node has no address on this host."""

    def told(answer: Future[tuple[str, ...]]) -> None:
        if (error := answer.exception()) is not None:
            hint = "routers and other nodes dial --advertise-host, so it must resolve on their hosts"
            log.warn("advertised_host_unknown", reason=str(error), hint=hint)

    resolver.resolve(f"tcp://{host}:1").add_done_callback(told)


def does_not_resolve(address: str, why: str) -> LinkError:
    """The error for a host name that has no address, or none in time."""
    return LinkError(f"{split_address(address)[0]} does not resolve: {why}")


def split_address(address: str) -> tuple[str, int | None]:
    """Host and port of `tcp://HOST:PORT`; the port is None when there is none that is valid."""
    host, _, digits = address.removeprefix("tcp://").rpartition(":")
    port = int(digits) if digits.isdecimal() and len(digits) <= 5 else 0
    return host.removeprefix("[").removesuffix("]"), port if 0 < port < 65536 else None


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
