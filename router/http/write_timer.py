"""Drops a client that takes nothing of its answer for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.log import event


class WriteTimer:
    """The timer of one connection. While `is_added_to()`, the number of waiting bytes says nothing of the client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        timeout_s: float,
        is_added_to: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._timeout_s = timeout_s
        self._is_added_to = is_added_to
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on the client must take some bytes within `timeout_s`."""
        self.stop()
        num_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout_s, self._look, num_bytes)

    def stop(self) -> None:
        """End the timer, since no bytes wait or more are being written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, num_before: int) -> None:
        """Drop a client that has taken none of the waiting bytes since the timer was started."""
        self._timer = None
        num_bytes = self._transport.get_write_buffer_size()
        if num_bytes == 0 or self._is_added_to():
            return
        if num_bytes == num_before:
            client = self._transport.get_extra_info("peername")
            event("client_takes_nothing", client=client, num_bytes=num_bytes)
            self._transport.abort()
        else:
            self.start()
