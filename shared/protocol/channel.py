"""A node's control sockets, owned by one thread: typed messages in and out.

A ZMQ socket belongs to one thread; other threads queue commands for it. On the wire a message is the msgpack of a
tagged union, in as many frames as its length takes. A dialling socket's identity reads `kind|peer|n`: what the
dialler is ("router", "sender", "node"), its peer id, and a counter, so that a second dial of the same peer is never
taken for the first.
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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared import log
from shared.errors import ConfigError, LinkError
from shared.protocol.dial_socket import (
    CONNECT_TIMEOUT_S,
    MAX_SOCKETS,
    DialSocket,
    bound_strangers,
    from_frames,
    to_frames,
)
from shared.protocol.messages import FRAME_ERRORS, Outbox, Struct
from shared.protocol.resolver import Resolver, does_not_resolve
from shared.protocol.security import FleetKey

OnMessage = Callable[[str, Any], None]
"""(peer id, message). Called on the control thread: must not block."""

MAX_QUEUED_MESSAGES = 100_000
MAX_DIALLERS = 4096
"""Peers that are remembered; each restart of a peer makes a new one."""
POLL_MS = 1000


@dataclass(frozen=True, slots=True)
class Handlers:
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
    """A peer that this node dials. There are no sockets until its host name is resolved."""

    peer: str
    address: str
    identity: str
    handlers: Handlers
    on_connected: Callable[[str], None]
    on_disconnected: Callable[[str, str], None]
    connected_by: float
    """The clock's time after which the dial is given up, unless it is connected."""
    connected: bool = False
    sockets: DialSocket[zmq.Socket[bytes]] | None = None
    unsent: list[list[bytes]] = field(default_factory=list)
    """Messages, in frames, that wait for the sockets."""


@dataclass(eq=False, slots=True)
class _Timer:
    interval_s: float
    run: Callable[[], None]
    due: float


@dataclass(frozen=True, slots=True)
class _Towards:
    """The Outbox of a ControlThread in one direction."""

    control: ControlThread
    dialled: bool

    def send(self, to: str, message: Struct) -> None:
        """Queue `message` for the peer `to`, if it is connected in this direction."""
        self.control.send(to, message, dialled=self.dialled)


class ControlThread:
    """One ROUTER socket for the peers that dial this node, one DEALER for each peer that this node dials."""

    def __init__(
        self,
        fleet_key: FleetKey | None = None,
        resolver: Resolver | None = None,
        *,
        max_diallers: int = MAX_DIALLERS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`connect_timeout_s` is for a dial to be answered, and for the handshake of a dialler."""
        self._max_diallers = max_diallers
        self._connect_timeout_s = connect_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._resolver = resolver or Resolver()
        self._fleet_key = fleet_key
        self._authenticator = fleet_key.authenticator(self._context) if fleet_key else None
        self._encoder = msgspec.msgpack.Encoder()
        self._handlers: dict[str, Handlers] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._server: zmq.Socket[bytes] | None = None
        self._diallers: OrderedDict[str, _Dialler] = OrderedDict()
        """Peers that dialled this node, the one heard longest ago first; a living peer is heard every second."""
        self._dialled: dict[str, _Dialled] = {}
        self._dials = itertools.count(1)
        self.to_dialled: Outbox = _Towards(self, dialled=True)
        """To the peers that this node dialled, and no others."""
        self.to_diallers: Outbox = _Towards(self, dialled=False)
        """To the peers that dialled this node, also when this node has dialled them under the same id."""
        self._timers: list[_Timer] = []
        self._poller = zmq.Poller()
        self._stopping = False
        self._stranger_ignored = log.LimitedWarning("stranger_ignored")
        self._message_ignored = log.LimitedWarning("message_ignored")
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # ------------------------------------------------------------------------------ before it runs
    def bind(self, host: str, port: int) -> int:
        """Take the port, so that a conflict shows early; diallers wait until `admit`. Returns the port.

        Call before `start`. Raises ConfigError.
        """
        server = self._context.socket(zmq.ROUTER)
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        server.sndhwm = server.rcvhwm = MAX_QUEUED_MESSAGES
        server.linger = 0
        bound_strangers(server, self._connect_timeout_s)
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
    def admit(self, handlers: dict[str, Handlers]) -> None:
        """Begin to listen to diallers of these kinds, also to those that have dialled already."""
        self._post(lambda: self._admit(handlers))

    def send(self, to: str, message: Struct, *, dialled: bool) -> None:
        """Queue a message to a peer that this node dialled, or to one that dialled this node."""
        frames = to_frames(self._encoder.encode(message))
        self._post(lambda: self._send(to, frames, dialled))

    def dial(
        self,
        peer: str,
        address: str,
        identity: str,
        handlers: Handlers,
        on_connected: Callable[[str], None],
        on_disconnected: Callable[[str, str], None],
    ) -> None:
        """Connect to `address` and call the peer there `peer`.

        A dial ends with one `on_disconnected`, also one that has failed or was not answered in time; it is never
        taken up again by itself. `hang_up` ends it without.
        """
        connected_by = time.monotonic() + self._connect_timeout_s
        dialled = _Dialled(peer, address, identity, handlers, on_connected, on_disconnected, connected_by)
        self._post(lambda: self._dial(dialled))

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
            if dialled.sockets is not None:
                dialled.sockets.close(int(flush_s * 1000))
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
            return  # the socket is full, so the thread wakes up in any case
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
            for dialled in list(self._dialled.values()):
                if dialled.sockets is not None and dialled.sockets.socket in ready:
                    self._receive_dialled(dialled, dialled.sockets.socket)
                if dialled.sockets is not None and dialled.sockets.monitor in ready:
                    self._watch(dialled, dialled.sockets)
                if not dialled.connected and time.monotonic() >= dialled.connected_by:
                    self._give_up(dialled)

    def _run_timers(self) -> int:
        """Call the timers that are due. Returns the milliseconds until the next one is, at most POLL_MS."""
        now = time.monotonic()
        for timer in self._timers:
            if now >= timer.due:
                timer.due = now + timer.interval_s
                self._guarded(timer.run)
        return min([POLL_MS, *(max(0, math.ceil(1000 * (timer.due - now))) for timer in self._timers)])

    def _admit(self, handlers: dict[str, Handlers]) -> None:
        assert self._server is not None, "bind comes first"
        self._handlers = handlers
        self._poller.register(self._server, zmq.POLLIN)

    def _stop(self) -> None:
        self._stopping = True

    def _send(self, to: str, frames: list[bytes], to_dialled: bool) -> None:
        dialled = self._dialled.get(to) if to_dialled else None
        dialler = None if to_dialled else self._diallers.get(to)
        try:
            if dialled is not None and dialled.sockets is None:
                dialled.unsent.append(frames)
            elif dialled is not None and dialled.sockets is not None:
                dialled.sockets.socket.send_multipart(frames, zmq.NOBLOCK)
            elif self._server is not None and dialler is not None and dialler.reachable:
                self._server.send_multipart([dialler.identity, *frames], zmq.NOBLOCK)
            else:
                log.event("peer_unknown", level=logging.DEBUG, peer=to)
        except zmq.ZMQError as error:
            log.event("peer_gone", level=logging.DEBUG, peer=to, error=error)
            if dialler is not None:
                dialler.reachable = False

    def _dial(self, dialled: _Dialled) -> None:
        self._close_dialled(dialled.peer)
        self._dialled[dialled.peer] = dialled
        resolved = self._resolver.resolve(dialled.address)
        if resolved.done():
            self._connect(dialled, resolved)
        else:
            resolved.add_done_callback(lambda done: self._post(lambda: self._connect(dialled, done)))

    def _connect(self, dialled: _Dialled, resolved: Future[tuple[str, ...]]) -> None:
        if self._dialled.get(dialled.peer) is not dialled:
            return  # hung up meanwhile
        try:
            dialled.sockets = DialSocket(
                self._context,
                resolved.result()[0],
                f"{dialled.identity}|{next(self._dials)}",
                self._fleet_key,
                max_queued_messages=MAX_QUEUED_MESSAGES,
            )
        except (LinkError, zmq.ZMQError) as error:
            self._lose(dialled, f"{dialled.address} cannot be dialled: {error}")
            return
        self._poller.register(dialled.sockets.socket, zmq.POLLIN)
        self._poller.register(dialled.sockets.monitor, zmq.POLLIN)
        for frames in dialled.unsent:
            self._send(dialled.peer, frames, to_dialled=True)
        dialled.unsent.clear()

    def _give_up(self, dialled: _Dialled) -> None:
        if self._dialled.get(dialled.peer) is not dialled:
            return  # lost or hung up just now
        waited = f"no answer within {self._connect_timeout_s:g} s"
        if dialled.sockets is None:
            waited = str(does_not_resolve(dialled.address, waited))
        self._lose(dialled, f"{dialled.address} cannot be dialled: {waited}")

    def _lose(self, dialled: _Dialled, reason: str) -> None:
        self._close_dialled(dialled.peer)
        self._guarded(lambda: dialled.on_disconnected(dialled.peer, reason))

    def _close_dialled(self, peer: str) -> None:
        dialled = self._dialled.pop(peer, None)
        if dialled is None or dialled.sockets is None:
            return
        self._poller.unregister(dialled.sockets.socket)
        self._poller.unregister(dialled.sockets.monitor)
        dialled.sockets.close(0)

    def _receive_server(self, server: zmq.Socket[bytes]) -> None:
        for _ in range(1000):  # then look at the other sockets
            try:
                frames = server.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, _, rest = frames[0].decode(errors="replace").partition("|")
            peer, _, dial = rest.rpartition("|")
            handlers = self._handlers.get(kind)
            if handlers is None or not peer or not dial.isdecimal() or len(frames) < 2:
                self._stranger_ignored(identity=frames[0][:80], frames=len(frames))
                continue
            known = self._diallers.get(peer)
            if known is not None and int(dial) < known.dial:
                continue  # a leftover of a connection that the peer has given up
            self._diallers[peer] = _Dialler(frames[0], int(dial))
            self._diallers.move_to_end(peer)
            if len(self._diallers) > self._max_diallers:
                self._diallers.popitem(last=False)
            self._handle(peer, handlers, from_frames(frames[1:]))

    def _receive_dialled(self, dialled: _Dialled, sock: zmq.Socket[bytes]) -> None:
        for _ in range(1000):
            if self._dialled.get(dialled.peer) is not dialled:
                return  # a handler hung up
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(dialled.peer, dialled.handlers, from_frames(frames))

    def _handle(self, peer: str, handlers: Handlers, frame: bytes) -> None:
        try:
            message = handlers.decoder.decode(frame)
        except FRAME_ERRORS as error:
            self._message_ignored(peer=peer, error=error, nbytes=len(frame))
            return
        self._guarded(lambda: handlers.on_message(peer, message))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a handler or a command. Its exception is logged, so that the control thread goes on with the others."""
        try:
            work()
        except Exception:
            log.crash("control_error")

    def _watch(self, dialled: _Dialled, sockets: DialSocket[zmq.Socket[bytes]]) -> None:
        if self._dialled.get(dialled.peer) is not dialled:
            return  # a handler hung up
        reason = sockets.seen(parse_monitor_message(sockets.monitor.recv_multipart())["event"])
        if reason is None:
            dialled.connected = True
            self._guarded(lambda: dialled.on_connected(dialled.peer))
        else:
            self._lose(dialled, reason)
