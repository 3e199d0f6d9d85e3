"""The planner's process beside the routers, and the two pipes that lead to it and back.

routers ──a line for each request──▶ python -m planner advise ──Advice──▶ supervisor ──feed──▶ routers
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec

from router.api.live_feed import Advice
from router.http.config import PlanOptions
from router.processes.child_process import ChildProcess


class Adviser:
    """Runs it, and calls `on_advice` for what it says."""

    def __init__(self, options: PlanOptions, on_advice: Callable[[Advice], None]) -> None:
        self._on_advice = on_advice
        # The supervisor keeps both ends: while the child is started again, nothing breaks, and lines wait for it.
        self._reads, self.traffic_fd = os.pipe()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        fds = (self._reads, self._theirs.fileno())
        argv = (
            "-m",
            "planner",
            "advise",
            "--traffic-fd",
            str(fds[0]),
            "--advice-fd",
            str(fds[1]),
            *options.argv(),
        )
        self.child = ChildProcess("planner", "adviser", lambda: argv, pass_fds=fds)

    async def listen(self) -> None:
        """Pass on what it says, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            said = await loop.sock_recv(self._ours, 1 << 16)
            self._on_advice(msgspec.msgpack.decode(said, type=Advice))

    def close(self) -> None:
        """Close the pipes, when the routers and the child have ended."""
        for fd in (self._reads, self.traffic_fd):
            os.close(fd)
        self._ours.close()
        self._theirs.close()
