"""The TCP port where a node accepts links: one for all of them, open while it has or builds a link that it accepts.

A connection begins with a hello, which only the two ends of one link that is being built know, and which admits one
connection. A thread of the connection reads it. A connection is closed that says something else, or nothing for
HELLO_TIMEOUT_S, and the oldest stranger when there are MAX_STRANGERS newer ones. So connections that say nothing keep
no place from a peer, whose hello follows its connection at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from shared import log
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.transports.common import peer_answers, read_whole

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


class Acceptor:
    """Accepts on `listener`, until `close`."""

    def __init__(
        self, listener: socket.socket, threads: DeviceThreads, hello_timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._threads = threads
        self._hello_timeout_s = hello_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._expected: dict[bytes, Future[socket.socket]] = {}
        """Connections that are to come, by their hellos."""
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not said their hello, the oldest first."""
        self._warn = log.LimitedWarning("kv_port_stranger")
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
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for stranger in self._strangers:
                _hang_up(stranger)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closed:  # no descriptor is left; the connection waits
                    self._warn(reason=error)
                    time.sleep(_NO_DESCRIPTOR_PAUSE_S)
                continue
            with self._lock:
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _hang_up(oldest)
                self._strangers[sock] = None
            self._threads.start("kv hello", partial(self._hear, sock, address[0]))

    def _hear(self, sock: socket.socket, address: str) -> None:
        """Admit a connection if its hello is expected, else close it."""
        hello, reason = bytearray(HELLO_NBYTES), "no such link is expected"
        sock.settimeout(self._hello_timeout_s)
        try:
            with peer_answers(sock):
                read_whole(sock, memoryview(hello))
        except LinkError as error:
            reason = str(error)
        with self._lock:
            self._strangers.pop(sock, None)
            arriving = self._expected.pop(bytes(hello), None)
            if arriving is not None:
                arriving.set_result(sock)
                return
        self._warn(address=address, reason=reason)
        sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Have the thread that reads from `sock` close it."""
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)
