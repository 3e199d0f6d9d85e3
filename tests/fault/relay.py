"""A relay of TCP connections that delays what passes, and now and then holds it up as a lost packet would."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType


class Relay:
    """Listens at `host` and passes everything on to `target`, for the length of a `with` block.

    Each piece waits `delay_s`; every `stall_every`th one also waits `stall_s`, as for a retransmission.
    """

    def __init__(
        self, host: str, target: tuple[str, int], *, delay_s: float, stall_s: float, stall_every: int
    ) -> None:
        self._target = target
        self._delay_s, self._stall_s, self._stall_every = delay_s, stall_s, stall_every
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_pieces = 0
        self.num_stalls = 0
        self._threads = [threading.Thread(target=self._accept, name="relay")]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # its other end was faster
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is shut down
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink), name="relay")
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.num_pieces += 1
                time.sleep(self._delay_s)
                if self.num_pieces % self._stall_every == 0:
                    self.num_stalls += 1
                    time.sleep(self._stall_s)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_RDWR)
