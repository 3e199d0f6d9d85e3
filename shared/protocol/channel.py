"""A node's control sockets, owned by one thread: typed messages in and out.

A ZMQ socket belongs to one thread; everybody else queues commands for it. On the wire a message is one frame,
the msgpack of a tagged union. A dialling socket's identity reads `kind|peer|n`: what the dialler is ("router",
"prefill", "node"), its peer id, and a counter, so that a second dial of the same peer is never taken for the first.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared import log
from shared.errors import ConfigError
from shared.protocol.messages import FRAME_ERRORS, Struct
from shared.protocol.security import FleetKey

OnMessage = Callable[[str, Any], None]
"""(peer id, message). Called on the control thread: must not block."""

MAX_QUEUED_MESSAGES = 100_000
MAX_MESSAGE_BYTES = 256 << 20
MAX_DIALLERS = 4096
"""Peers that are remembered; each restart of a peer makes a new one."""
POLL_MS = 1000


@dataclass(frozen=True, slots=True)
class Guests:
    """How messages of one kind of dialler are read and handled."""

    decoder: msgspec.msgpack.Decoder[Any]
    on_message: OnMessage


@dataclass(eq=False, slots=True)
class _Dialler:
    identity: bytes
    dial: int
    reachable: bool = True


@dataclass(eq=False, slots=True)
class _Dialled:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    guests: Guests
    on_connected: Callable[[str], None]
    on_disconnected: Callable[[str, str], None]


@dataclass(eq=False, slots=True)
class _Timer:
    interval_s: float
    run: Callable[[], None]
    due: float


class ControlThread:
    """One ROUTER socket for those who dial this node, one DEALER for each peer that this node dials."""

    def __init__(self, fleet_key: FleetKey | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._fleet_key = fleet_key
        self._authenticator = fleet_key.authenticator(self._context) if fleet_key else None
        self._encoder = msgspec.msgpack.Encoder()
        self._guests: dict[str, Guests] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._server: zmq.Socket[bytes] | None = None
        self._diallers: OrderedDict[str, _Dialler] = OrderedDict()
        """Who dialled this node, the one heard longest ago first; a living peer is heard every second."""
        self._dialled: dict[str, _Dialled] = {}
        self._dials = itertools.count(1)
        self._timers: list[_Timer] = []
        self._poller = zmq.Poller()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # ------------------------------------------------------------------------------ before it runs
    def bind(self, host: str, port: int) -> int:
        """Take the port, so that a conflict shows early; who dials waits until `admit`. Returns the port.

        Call before `start`. Raises ConfigError.
        """
        server = self._context.socket(zmq.ROUTER)
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._configure(server)
        if self._fleet_key is not None:
            self._fleet_key.secure_server(server)
        try:
            server.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            server.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self._server = server
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(address.rsplit(":", 1)[1])

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    # --------------------------------------------------------------------------------- any thread
    def admit(self, guests: dict[str, Guests]) -> None:
        """Begin to listen to diallers of these kinds, those who have dialled already included."""
        self._post(lambda: self._admit(guests))

    def send(self, to: str, message: Struct) -> None:
        """See `Outbox`. A peer that was dialled is preferred to one that dialled us under the same id."""
        frame = self._encoder.encode(message)
        self._post(lambda: self._send(to, frame))

    def dial(
        self,
        peer: str,
        address: str,
        identity: str,
        guests: Guests,
        on_connected: Callable[[str], None],
        on_disconnected: Callable[[str, str], None],
    ) -> None:
        """Connect to `address` and call the peer there `peer`. A lost connection is never taken up again."""
        self._post(lambda: self._dial(peer, address, identity, guests, on_connected, on_disconnected))

    def hang_up(self, peer: str) -> None:
        """Close the connection that this node dialled."""
        self._post(lambda: self._close_dialled(peer))

    def every(self, interval_s: float, run: Callable[[], None]) -> None:
        """Have `run` called on the control thread every `interval_s` from now on. It must not block."""
        self._post(lambda: self._timers.append(_Timer(interval_s, run, time.monotonic() + interval_s)))

    def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued, close every socket and end the thread."""
        self._post(self._stop)
        if self._thread.is_alive():
            self._thread.join()
        for dialled in self._dialled.values():
            dialled.monitor.close(linger=0)
            dialled.socket.close(linger=int(flush_s * 1000))
        if self._server is not None:
            self._server.close(linger=int(flush_s * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        try:
            self._wake_write.send(b"x")
        except BlockingIOError:
            return  # the thread has more than enough reasons to wake up
        except OSError:
            log.event("control_closed", level=logging.DEBUG)  # a late message of a thread that is ending

    # ---------------------------------------------------------------------------- the control thread
    def _run(self) -> None:
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)
        while not self._stopping:
            ready = dict(self._poller.poll(self._run_timers()))
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(65536)
            while self._commands:
                self._guarded(self._commands.popleft())
            if self._server is not None and self._server in ready:
                self._receive_server(self._server)
            for peer, dialled in list(self._dialled.items()):
                if dialled.socket in ready:
                    self._receive_dialled(peer, dialled)
                if dialled.monitor in ready:
                    self._watch(peer, dialled)

    def _run_timers(self) -> int:
        """Call what is due. Returns the milliseconds until something else may be, at most POLL_MS."""
        now = time.monotonic()
        for timer in self._timers:
            if now >= timer.due:
                timer.due = now + timer.interval_s
                self._guarded(timer.run)
        return min([POLL_MS, *(max(0, math.ceil(1000 * (timer.due - now))) for timer in self._timers)])

    def _admit(self, guests: dict[str, Guests]) -> None:
        assert self._server is not None, "bind comes first"
        self._guests = guests
        self._poller.register(self._server, zmq.POLLIN)

    def _stop(self) -> None:
        self._stopping = True

    def _configure(self, sock: zmq.Socket[bytes]) -> None:
        sock.sndhwm = sock.rcvhwm = MAX_QUEUED_MESSAGES
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.linger = 0

    def _send(self, to: str, frame: bytes) -> None:
        dialled = self._dialled.get(to)
        try:
            if dialled is not None:
                dialled.socket.send(frame, zmq.NOBLOCK)
            elif self._server is not None and (dialler := self._diallers.get(to)) and dialler.reachable:
                self._server.send_multipart([dialler.identity, frame], zmq.NOBLOCK)
            else:
                log.event("peer_unknown", level=logging.DEBUG, peer=to)
        except zmq.ZMQError as error:
            log.event("peer_gone", level=logging.DEBUG, peer=to, error=error)
            if dialled is None and self._server is not None:
                self._diallers[to].reachable = False

    def _dial(
        self,
        peer: str,
        address: str,
        identity: str,
        guests: Guests,
        on_connected: Callable[[str], None],
        on_disconnected: Callable[[str, str], None],
    ) -> None:
        self._close_dialled(peer)
        sock = self._context.socket(zmq.DEALER)
        self._configure(sock)
        sock.identity = f"{identity}|{next(self._dials)}".encode()
        if self._fleet_key is not None:
            self._fleet_key.secure_client(sock)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        monitor: zmq.Socket[bytes] = sock.get_monitor_socket(events)
        try:
            sock.connect(address)
        except zmq.ZMQError as error:
            sock.disable_monitor()
            monitor.close(linger=0)
            sock.close(linger=0)
            on_disconnected(peer, f"{address} cannot be dialled: {error}")
            return
        self._dialled[peer] = _Dialled(sock, monitor, guests, on_connected, on_disconnected)
        self._poller.register(sock, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _close_dialled(self, peer: str) -> None:
        dialled = self._dialled.pop(peer, None)
        if dialled is None:
            return
        self._poller.unregister(dialled.socket)
        self._poller.unregister(dialled.monitor)
        dialled.socket.disable_monitor()
        dialled.monitor.close(linger=0)
        dialled.socket.close(linger=0)

    def _receive_server(self, server: zmq.Socket[bytes]) -> None:
        for _ in range(1000):  # then look at the other sockets
            try:
                frames = server.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, _, rest = frames[0].decode(errors="replace").partition("|")
            peer, _, dial = rest.rpartition("|")
            guests = self._guests.get(kind)
            if guests is None or not peer or not dial.isdecimal() or len(frames) != 2:
                log.warn("stranger_ignored", identity=frames[0][:80], frames=len(frames))
                continue
            known = self._diallers.get(peer)
            if known is not None and int(dial) < known.dial:
                continue  # left over from a connection that the peer has given up, and what it said there with it
            self._diallers[peer] = _Dialler(frames[0], int(dial))
            self._diallers.move_to_end(peer)
            if len(self._diallers) > MAX_DIALLERS:
                self._diallers.popitem(last=False)
            self._handle(peer, guests, frames[1])

    def _receive_dialled(self, peer: str, dialled: _Dialled) -> None:
        for _ in range(1000):
            if self._dialled.get(peer) is not dialled:
                return  # a handler hung up
            try:
                frame = dialled.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(peer, dialled.guests, frame)

    def _handle(self, peer: str, guests: Guests, frame: bytes) -> None:
        try:
            message = guests.decoder.decode(frame)
        except FRAME_ERRORS as error:
            log.warn("message_ignored", peer=peer, error=error, nbytes=len(frame))
            return
        self._guarded(lambda: guests.on_message(peer, message))

    def _guarded(self, work: Callable[[], None]) -> None:
        """One message or command that fails must not make the node mute: it is logged, and the others go on."""
        try:
            work()
        except Exception:
            log.crash("control_error")

    def _watch(self, peer: str, dialled: _Dialled) -> None:
        event = parse_monitor_message(dialled.monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._guarded(lambda: dialled.on_connected(peer))
        elif event == zmq.EVENT_DISCONNECTED and self._dialled.get(peer) is dialled:
            self._close_dialled(peer)
            self._guarded(lambda: dialled.on_disconnected(peer, "connection closed"))
