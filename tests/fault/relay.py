"""A relay of TCP connections, which does to what passes what a bad network would."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What happens to each piece that passes.

    It waits `delay_s`. Every `stall_every`th one also waits `stall_s`, as for a retransmission. With `held`, it waits
    for other weather.
    """

    delay_s: float = 0.0
    stall_s: float = 0.0
    stall_every: int = 1
    held: bool = False


class Relay:
    """Passes on to `target` what comes to `listener`, which it closes, for the length of a `with` block."""

    def __init__(
        self, listener: socket.socket, target: tuple[str, int], weather: Weather | None = None
    ) -> None:
        self._listener = listener
        self._target = target
        self._weather = weather or Weather()
        self._changed = threading.Condition()
        """Guards all that changes."""
        self._connections: list[_Connection] = []
        self._cut_after: int | None = None
        self._resets = False
        self._accepts = threading.Thread(target=self._accept, name="relay")
        self.num_pieces = 0
        self.num_stalls = 0
        self.num_cuts = 0

    def __enter__(self) -> Relay:
        self._accepts.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepts.join()
        self._listener.close()
        self.turns(Weather())
        for connection in self._connections:
            connection.end()
            connection.join()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def turns(self, weather: Weather) -> None:
        """From the next piece on, this is the weather."""
        with self._changed:
            self._weather = weather
            self._changed.notify_all()

    def cut_after(self, nbytes: int, *, reset: bool) -> None:
        """End the connection by which so many bytes more have gone to the target, in the middle of a piece.

        Both ends see the end of the stream, or with `reset` that the connection is reset.
        """
        with self._changed:
            self._cut_after, self._resets = nbytes, reset

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is shut down
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # so its client hears
                    near.close()
                else:
                    self._connections.append(_Connection(self, near, far))

    def waits(self) -> None:
        """Keep a piece for as long as the weather has it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._weather.held)
            weather = self._weather
            self.num_pieces += 1
            stalls = bool(weather.stall_s) and self.num_pieces % weather.stall_every == 0
            self.num_stalls += stalls
        time.sleep(weather.delay_s + stalls * weather.stall_s)

    def before_cut(self, nbytes: int) -> tuple[int, bool] | None:
        """Of a piece of so many bytes, how many still pass, and whether a reset follows; None: it is not cut."""
        with self._changed:
            if self._cut_after is None:
                return None
            self._cut_after -= nbytes
            if self._cut_after > 0:
                return None
            cut, self._cut_after = self._cut_after, None
            self.num_cuts += 1
            return nbytes + cut, self._resets


class _Connection:
    """One that came, and one to the target; a thread for each direction."""

    def __init__(self, relay: Relay, near: socket.socket, far: socket.socket) -> None:
        self._relay = relay
        self._near, self._far = near, far
        self._resets = False
        self._threads = [
            threading.Thread(target=self._pass_on, args=ends, name="relay")
            for ends in ((near, far), (far, near))
        ]
        self._ended = threading.Barrier(2, action=self._close)
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End both connections."""
        for sock in (self._near, self._far):
            with contextlib.suppress(OSError):  # its other end was faster, or it is closed
                sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until both are closed."""
        for thread in self._threads:
            thread.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(1 << 16):
                self._relay.waits()
                cut = self._relay.before_cut(len(piece)) if sink is self._far else None
                if cut is not None:
                    nbytes, self._resets = cut
                    sink.sendall(piece[:nbytes])
                    self._cut()
                    break
                sink.sendall(piece)
            else:
                if not self._resets:
                    sink.shutdown(socket.SHUT_WR)
        except OSError:  # one of the peers is gone
            self.end()
        self._ended.wait()

    def _cut(self) -> None:
        if not self._resets:
            self.end()
            return
        for sock in (self._near, self._far):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.shutdown(socket.SHUT_RD)  # wakes the other thread, and says nothing to a peer

    def _close(self) -> None:
        self._near.close()
        self._far.close()
