"""Network namespaces for the nodes of a fleet, whose connections can be cut without either end being told.

Each node has a namespace of its own, and in it one end of a veth pair. The other end is a port of a bridge, which is
in the namespace of the test, and so of its router. A port that is down cuts its node off from all others. Ports that
are isolated reach the bridge, and no isolated port.

A process of its own makes an end of it all, and kills what still runs in the namespaces. It does so when its standard
input is closed, which also happens when the test is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

_END = """
read _
for name in $NAMES; do
    ip netns pids $BRIDGE-$name | xargs -r kill -9
    ip link delete $BRIDGE$name
    ip netns delete $BRIDGE-$name
done
ip link delete $BRIDGE
"""


_CLONE_NEWNET = 0x40000000
_IP_TRANSPARENT = 19
_TABLE = "100"
"""Of routes; nothing else uses it."""


def enter(namespace: str) -> None:
    """Take this thread, and all that it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class Namespaces:
    """A namespace for each of `names`, for the length of a `with` block. OSError: this machine has no such thing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._bridge = f"bt{os.getpid()}"
        self._net = f"198.18.{os.getpid() % 250}"
        """Of a range that is set aside for tests of networks (RFC 2544)."""

    def __enter__(self) -> Namespaces:
        self._end = subprocess.Popen(
            ["sh", "-c", _END],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a part that was not made cannot be deleted
            env={**os.environ, "BRIDGE": self._bridge, "NAMES": " ".join(self._names)},
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete()

    @property
    def own_address(self) -> str:
        """The IP address of the test, and of its router."""
        return f"{self._net}.1"

    def address(self, name: str) -> str:
        """The IP address of a node."""
        return f"{self._net}.{self._names.index(name) + 2}"

    def name_of(self, name: str) -> str:
        """The namespace of a node, for `enter`."""
        return f"{self._bridge}-{name}"

    def cut_off(self, name: str) -> None:
        """Nothing comes to a node any more, and nothing from it."""
        _ip("link", "set", f"{self._bridge}{name}", "down")

    def cut_between(self, *names: str) -> None:
        """Nothing goes from one of these nodes to another of them."""
        for name in names:
            _ip("link", "set", f"{self._bridge}{name}", "type", "bridge_slave", "isolated", "on")

    def throttle(self, name: str, rate: str, burst: str = "64kb") -> None:
        """What a node sends leaves at this rate after a burst, as `tc` names them (`80mbit`, `4kb`)."""
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "500ms")
        _run("tc", "-n", self.name_of(name), "qdisc", "replace", "dev", "eth0", *limit)

    @contextlib.contextmanager
    def intercepted(self, name: str, target: str, port: int) -> Iterator[socket.socket]:
        """A socket that gets, in the block, the connections of `name` to `port` of `target`.

        They have the addresses that they would have without it. The caller closes the socket.
        """
        namespace, address = self.name_of(name), self.address(target)
        rule = ("to", address, "ipproto", "tcp", "dport", str(port), "table", _TABLE)
        route = ("local", address, "dev", "lo", "src", self.address(name), "table", _TABLE)
        _ip("-n", namespace, "route", "add", *route)
        _ip("-n", namespace, "rule", "add", *rule)
        try:
            with ThreadPoolExecutor(1) as there:  # a thread that has entered a namespace stays in it
                listener = there.submit(_listen_transparently, namespace, (address, port)).result()
            yield listener
        finally:
            _ip("-n", namespace, "rule", "delete", *rule)
            _ip("-n", namespace, "route", "delete", *route)

    def heal(self) -> None:
        """Everything is connected again."""
        for name in self._names:
            port = f"{self._bridge}{name}"
            _ip("link", "set", port, "type", "bridge_slave", "isolated", "off")
            _ip("link", "set", port, "up")

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.own_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name in self._names:
            namespace, port = self.name_of(name), f"{self._bridge}{name}"
            _ip("netns", "add", namespace)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", port, "master", self._bridge)
            _ip("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")
        self.heal()

    def _delete(self) -> None:
        self._end.communicate()


def _listen_transparently(namespace: str, address: tuple[str, int]) -> socket.socket:
    enter(namespace)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)  # the address is another host's
    listener.bind(address)
    listener.listen()
    return listener


def _ip(*argv: str) -> None:
    _run("ip", *argv)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")


@functools.cache
def why_no_namespaces() -> str:
    """Why this machine can have none, or this process may not make any; empty when it can."""
    try:
        with Namespaces(("try",)) as network:
            network.cut_between("try")
            network.cut_off("try")
    except OSError as error:
        return str(error)
    return ""
