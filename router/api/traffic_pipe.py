"""What the planner's advice is computed from: a line for each request, on a pipe that all routers share."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping

from shared.log import LimitedWarning


class TrafficPipe:
    """Writes what a plan reads of --log-requests: each line in one piece, or not at all while the pipe is full."""

    def __init__(self, fd: int, fleet: Callable[[], str]) -> None:
        """`fleet` tells the nodes that live, as 2P1D."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._fleet = fleet
        self._lost = LimitedWarning("advice_misses_request")
        self.num_lost = 0

    def tell(self, trace: Mapping[str, object]) -> None:
        """A request has ended. Of a prompt whose hashes do not fit into a line, those of its end are left out."""
        fields = {"fleet": self._fleet(), **trace}
        prefixes = str(fields.get("prefixes", ""))
        room = max(0, select.PIPE_BUF - len(_line({**fields, "prefixes": ""})))
        if len(prefixes) > room:  # base64 of three hashes of 8 bytes is 32 letters
            fields["prefixes"] = (
                prefixes[: room // 32 * 32] if ";" not in prefixes else ";" * prefixes.count(";")
            )
        line = _line(fields)
        try:
            is_written = len(line) <= select.PIPE_BUF and bool(os.write(self._fd, line))
        except BlockingIOError:  # the adviser does not keep up, or is being started again
            is_written = False
        if not is_written:  # nor is a line of very many prompts, which would be torn
            self.num_lost += 1
            self._lost(num_lost=self.num_lost)


def _line(fields: Mapping[str, object]) -> bytes:
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"request request_id=- {words}\n".encode()
