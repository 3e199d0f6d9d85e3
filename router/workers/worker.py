"""`python -m router.workers.worker FD NAME FLAGS...`: one worker of a router, started by its parent only.

FD is this worker's end of the bus, FLAGS are the parent's. It ends with its parent, however that dies: the bus is
closed then, and so is standard input, which a thread waits for in case the event loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import uvloop

from router.__main__ import build_parser, router_config
from router.bus.colleagues import BusColleagues
from router.bus.worker_bus import BusEnd
from router.bus.worker_messages import (
    Announced,
    Answered,
    Asked,
    Begin,
    CannotStart,
    Check,
    Checked,
    Gone,
    Loaded,
    Ready,
    ReloadKeys,
    Replies,
    ToWorker,
)
from router.garbage import collect_rarely
from router.http.config import RouterConfig
from router.http.http_socket import bind_http, start_listening
from router.server import Router, load_model
from router.serving import stop_on_signals, unless
from shared import log
from shared.errors import ConfigError, LinkError

_CAN_SERVE_S = 5.0
"""A worker that was started again takes connections after this time even if it sees nobody who could serve."""


def main(argv: Sequence[str]) -> int:
    """Serve until the parent says that it is enough, or is gone."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent's business; it sends ReloadKeys
    fd, name, *flags = argv
    args = build_parser().parse_args(flags)
    log.setup(args.log_level, f"worker-{name}")
    config = router_config(args)
    watch = threading.Thread(
        target=_end_with_parent, args=(config.dispatch.stop_timeout_s,), name="parent", daemon=True
    )
    watch.start()
    try:
        return uvloop.run(_work(config, name, socket.socket(fileno=int(fd))))
    except KeyboardInterrupt:
        return 0


async def _work(config: RouterConfig, name: str, end: socket.socket) -> int:
    stop = stop_on_signals(lambda: os._exit(1))
    bus: BusEnd[ToWorker] = await BusEnd.open(end, ToWorker)
    try:
        await _serve(config, BusColleagues(name, bus), bus, stop)
    except ConfigError as e:
        bus.send(CannotStart(str(e)))
        return 2
    except LinkError:
        return 0  # the parent was gone before it began
    finally:
        await bus.close()
    return 0


async def _serve(
    config: RouterConfig, colleagues: BusColleagues, bus: BusEnd[ToWorker], stop: asyncio.Event
) -> None:
    begin = await bus.receive()
    assert isinstance(begin, Begin), begin
    config = replace(config, fleet=replace(config.fleet, join=begin.join))
    model = load_model(config.model, config) if config.model is not None else None
    collect_rarely()
    with contextlib.closing(bind_http(config.http.host, begin.http_port, shared=True)) as http_socket:
        bus.send(Loaded())
        async with Router(config, model, colleagues) as router:
            for incarnation in begin.turned_away:
                router.turn_away(incarnation)
            for message in begin.known:
                router.on_lobby(message)
            talk = _Talk(bus, router, colleagues)
            talking = asyncio.create_task(talk.run(), name="bus")
            talking.add_done_callback(lambda _: stop.set())
            try:
                if await unless(stop, _start(router, begin, http_socket, bus)):
                    await unless(stop, router.broken())
            finally:
                await router.stop_serving()
                await talk.close()
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)


async def _start(router: Router, begin: Begin, http_socket: socket.socket, bus: BusEnd[ToWorker]) -> None:
    """The first time clients may see that the fleet is not there yet; later, others serve meanwhile."""
    if begin.restarted:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CAN_SERVE_S):
                await router.ready()
    start_listening(
        http_socket
    )  # not before: the kernel would hand connections to one that does not answer yet
    await router.serve(http_socket)
    await router.ready(() if begin.restarted else begin.node_ids)
    bus.send(Ready(router.model.name()))


class _Talk:
    """What the parent says, and what other workers ask through it."""

    def __init__(self, bus: BusEnd[ToWorker], router: Router, colleagues: BusColleagues) -> None:
        self._bus = bus
        self._router = router
        self._colleagues = colleagues
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Listen until the parent is gone."""
        with contextlib.suppress(LinkError):
            while True:
                self._handle(await self._bus.receive())

    async def close(self) -> None:
        """Answer nothing any more."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Announced(said):
                self._router.on_lobby(said)
            case Gone(node_id, reason):
                self._router.retire(node_id, reason)
            case Asked():
                task = asyncio.create_task(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Replies():
                self._colleagues.on_replies(message)
            case ReloadKeys():
                self._router.keys.reload()
            case Check():
                self._bus.send(Checked())
            case Begin():
                raise AssertionError("a worker begins once")

    async def _answer(self, asked: Asked) -> None:
        self._bus.send(Answered(asked.call_id, await self._router.answers.answer(asked.question)))


def _end_with_parent(grace_s: float) -> None:
    """The event loop ends by itself when the bus does; this is for one that hangs."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    time.sleep(grace_s)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
