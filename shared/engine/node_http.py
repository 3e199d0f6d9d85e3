"""The HTTP port of a node: /live, /ready and /metrics, for Kubernetes, load balancers and Prometheus.

The port is off unless --http-port is given. It needs no key, takes no body and changes nothing. It has a thread of
its own, so that it answers during a long step, and reads only values that the scheduler replaces as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import h11
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from shared import log
from shared.errors import ConfigError
from shared.protocol.load_metrics import LoadCollector
from shared.protocol.messages import Load, Role
from shared.timeline import Clock

STILL_S = 10.0
"""A loop that has stood still for longer is not live, as for routers with their default --node-timeout-s."""
EXCHANGE_S = 5.0
"""A connection is closed after this time, whatever its client does."""
MAX_CONNECTIONS = 64
"""Beyond them the oldest connection is closed for a new one, so that slow clients keep no probe out."""
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted, so that a probe is not lost in a burst."""
_ACCEPTED_AT_ONCE = MAX_CONNECTIONS // 2
"""A burst must not close connections whose requests were never read."""
MAX_HEADER_BYTES = 8 << 10

_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class InRole:
    """A node that serves in a role. The functions are called on the thread of the HTTP port."""

    role: Role
    node_id: str
    load: Callable[[], Load]
    is_draining: Callable[[], bool]


class NodeStatus:
    """What the HTTP port tells. The main thread calls `serves` and `serves_not`, the port's thread all others."""

    def __init__(self, model_name: str, clock: Clock) -> None:
        self._clock = clock
        self._in_role: InRole | None = None
        self._absent = "the model is being loaded"
        self._progress = -1
        self._progressed_at = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(LoadCollector(lambda: model_name, self._loads))
        ProcessCollector(registry=self._registry)

    def serves(self, in_role: InRole) -> None:
        """Note that the loop of a role begins."""
        self._in_role = in_role

    def serves_not(self, reason: str) -> None:
        """Note that the loop has ended. The node may take another role, or its process ends."""
        self._absent = reason
        self._in_role = None

    def answer(self, method: bytes, target: bytes) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body."""
        if method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"this port takes GET and HEAD\n"
        match target.partition(b"?")[0]:
            case b"/live":
                return _probe(self._why_not_live())
            case b"/ready":
                return _probe(self._why_not_ready())
            case b"/metrics":
                return HTTPStatus.OK, _METRICS, generate_latest(self._registry)
            case _:
                return HTTPStatus.NOT_FOUND, _TEXT, b"this port has /live, /ready and /metrics\n"

    def _why_not_live(self) -> str:
        """Empty, or why the process should be started again. A node that loads is live, however long that takes."""
        if (in_role := self._in_role) is None:
            return ""
        now, progress = self._clock(), in_role.load().progress
        if progress != self._progress:
            self._progress, self._progressed_at = progress, now
        still_s = now - self._progressed_at
        return f"the loop has stood still for {still_s:.0f} s" if still_s > STILL_S else ""

    def _why_not_ready(self) -> str:
        """Empty, or why routers should send no requests."""
        if (in_role := self._in_role) is None:
            return self._absent
        if in_role.is_draining():
            return "the node is draining"
        if leak := in_role.load().leak:
            return f"the node leaks KV pages: {leak}"
        return self._why_not_live()

    def _loads(self) -> list[tuple[Role, str, Load]]:
        in_role = self._in_role
        return [] if in_role is None else [(in_role.role, in_role.node_id, in_role.load())]


class NodeHttp:
    """Answers on its own thread, for the length of a `with` block. `port` 0: a free one."""

    def __init__(self, host: str, port: int, status: NodeStatus, exchange_s: float = EXCHANGE_S) -> None:
        self.port = port
        self._host = host
        self._exchange_s = exchange_s
        self._status = status
        self._open: dict[asyncio.Task[None], None] = {}
        """The exchanges that are under way, the oldest first."""

    def __enter__(self) -> NodeHttp:
        """Take the port and listen. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            where = f"--http-host {self._host}, --http-port {self.port}"
            raise ConfigError(f"{where}: {error.strerror or error}") from error
        self.port = listening.getsockname()[1]
        self._loop, self._ends = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="http", daemon=True)
        self._thread.start()
        log.event("node_http", host=self._host, port=self.port)
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection, and wait for the thread."""
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        async with await asyncio.start_server(self._on_client, sock=listening, backlog=_ACCEPTED_AT_ONCE):
            listening.listen(BACKLOG)
            await self._ends.wait()
            exchanges = [*self._open]
            for exchange in exchanges:
                exchange.cancel()
            await asyncio.gather(*exchanges, return_exceptions=True)

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]  # it ends later, and a burst must not count on it again
            oldest.cancel()
        self._open[task] = None
        try:
            # The client is gone or slow, or has to go: asyncio would log what a stranger can cause.
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(self._exchange_s):
                    await self._exchange(reader, writer)
        finally:
            self._open.pop(task, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and wait until the client closes the connection."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        method = b""
        try:
            while (request := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(MAX_HEADER_BYTES))
            if not isinstance(request, h11.Request):
                return  # the client has hung up
            method = request.method
            status, kind, body = self._status.answer(method, request.target)
        except h11.RemoteProtocolError as error:
            status, kind, body = HTTPStatus(error.error_status_hint), _TEXT, f"{error}\n".encode()
        headers = {"content-type": kind, "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=[*headers.items()], reason=status.phrase)
        for part in (response, h11.Data(b"" if method == b"HEAD" else body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        writer.write_eof()
        while await reader.read(MAX_HEADER_BYTES):
            pass  # to close while data is unread would be a reset, which may overtake the answer


def _probe(why_not: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if why_not else HTTPStatus.OK
    return status, _TEXT, f"{why_not or 'ok'}\n".encode()
