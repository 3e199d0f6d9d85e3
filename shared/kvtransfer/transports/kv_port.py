"""The TCP port where a node accepts links: one for all of them, open while it has or builds a link that it accepts.

A connection begins with a hello, which only the two ends of one link that is being built know, and which admits one
connection. A thread accepts connections and reads hellos. It closes a stranger's connection
- at the first byte that is in no hello,
- after HELLO_TIMEOUT_S,
- when there are MAX_STRANGERS newer ones: the oldest goes first, so connections that say nothing keep no place from a
  peer, whose hello follows its connection at once.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from shared import log
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError

MAGIC = b"BatonKV1"
HELLO_NBYTES = len(MAGIC) + 32
HELLO_TIMEOUT_S = 5.0
MAX_STRANGERS = 128
_BACKLOG = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.05


class KvPort:
    """`port` of the interface `host`; 0: a free one whenever it is opened. ConfigError: it cannot be had now."""

    def __init__(self, host: str, port: int, threads: DeviceThreads) -> None:
        self._host = host
        self._port = port
        self._threads = threads
        self._lock = threading.Lock()
        self._acceptor: Acceptor | None = None
        self._num_users = 0
        try:
            self._listen().close()
        except OSError as error:
            raise ConfigError(str(error)) from None

    @contextmanager
    def opened(self) -> Iterator[Acceptor]:
        """Keep the port open in the block. OSError: it cannot be had."""
        with self._lock:
            self._acceptor = self._acceptor or Acceptor(self._listen(), self._threads)
            self._num_users += 1
            acceptor = self._acceptor
        try:
            yield acceptor
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    acceptor.close()
                    self._acceptor = None

    def _listen(self) -> socket.socket:
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, address = found[0]
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:  # also at a link, when another node of this host has taken it meanwhile
            raise OSError(f"--kv-port {self._port}: {self._host} cannot be listened on: {error}") from None


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not said its hello."""

    sock: socket.socket
    address: str
    leaves_at: float
    said: bytes = b""


class Acceptor:
    """Accepts on `listener` from a thread of its own, until `close`."""

    def __init__(
        self, listener: socket.socket, threads: DeviceThreads, hello_timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        listener.setblocking(False)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._hello_timeout_s = hello_timeout_s
        self._lock = threading.Lock()
        self._expected: dict[bytes, Future[socket.socket]] = {}
        """Connections that are to come, by their hellos."""
        self._strangers: dict[_Stranger, None] = {}
        """The oldest first."""
        self._warn = log.LimitedWarning("kv_port_stranger")
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._thread = threads.start("kv port", self._run)

    @contextmanager
    def expecting(self, hello: bytes) -> Iterator[Future[socket.socket]]:
        """Admit one connection that begins with `hello`, in the block. If the block raises, it is closed."""
        arriving: Future[socket.socket] = Future()
        with self._lock:
            self._expected[hello] = arriving
        try:
            yield arriving
        except BaseException:
            with self._lock:
                self._expected.pop(hello, None)
            if arriving.done():
                arriving.result().close()
            raise

    def close(self) -> None:
        """Close the port and every stranger's connection."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._woken, self._selector as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                oldest = self._oldest
                timeout_s = None if oldest is None else max(0.0, oldest.leaves_at - time.monotonic())
                for key, _ in selector.select(timeout_s):
                    if key.fileobj is self._woken:
                        for stranger in list(self._strangers):
                            self._forget(stranger).close()
                        return
                    if key.fileobj is self._listener:
                        self._meet()
                    elif key.data in self._strangers:  # it was not closed in this round
                        self._hear(key.data)
                while (oldest := self._oldest) is not None and oldest.leaves_at <= time.monotonic():
                    self._turn_away(oldest, f"no hello within {self._hello_timeout_s:g} s")

    @property
    def _oldest(self) -> _Stranger | None:
        """The stranger that leaves next, since each may stay equally long; None when there is none."""
        return next(iter(self._strangers), None)

    def _meet(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:  # it has left already
            return
        except OSError as error:  # no descriptor is left; the connection waits, so the port stays readable
            self._warn(reason=error)
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)
            return
        sock.setblocking(False)
        stranger = _Stranger(sock, address[0], time.monotonic() + self._hello_timeout_s)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._hear(stranger)
        if len(self._strangers) > MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)), f"more than {MAX_STRANGERS} strangers")

    def _hear(self, stranger: _Stranger) -> None:
        try:
            said = stranger.sock.recv(HELLO_NBYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError as error:
            self._turn_away(stranger, str(error))
            return
        stranger.said += said
        if not said or not stranger.said.startswith(MAGIC[: len(stranger.said)]):
            self._turn_away(stranger, "this is no hello" if said else "it left")
        elif len(stranger.said) == HELLO_NBYTES:
            self._admit(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        with self._lock:
            hello = next((one for one in self._expected if hmac.compare_digest(one, stranger.said)), None)
            if hello is not None:
                self._expected.pop(hello).set_result(self._forget(stranger))
                return
        self._turn_away(stranger, "no such link is expected")

    def _turn_away(self, stranger: _Stranger, reason: str) -> None:
        self._warn(address=stranger.address, reason=reason)
        self._forget(stranger).close()

    def _forget(self, stranger: _Stranger) -> socket.socket:
        del self._strangers[stranger]
        self._selector.unregister(stranger.sock)
        return stranger.sock
