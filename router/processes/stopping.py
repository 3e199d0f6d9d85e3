"""Signals that end a process, and waiting that they interrupt."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from shared import log


def stop_on_signals(kill: Callable[[], None]) -> asyncio.Event:
    """An event that the first SIGTERM or Ctrl-C sets; at the second `kill` is called."""
    stop = asyncio.Event()

    def on_signal(name: str) -> None:
        log.event("signal", signal=name)
        if stop.is_set():
            kill()
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum.name)
    return stop


async def unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """True when `work` was done before a signal came; it is cancelled otherwise."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
