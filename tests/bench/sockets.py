"""How fast do KV pages move over each transport that is made of sockets, against raw TCP, in the same run?

Two processes on loopback for each transport. In each round every transport moves a batch over its whole path (as in
`transfer`), one after the other, and then two processes move the same bytes over raw TCP: 4 MiB messages,
`sendall` and `recv_into`, nothing else.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from shared.config import TransferOptions
from tests.bench.stats import figure, ratios
from tests.bench.table import Row
from tests.bench.transfer import MESSAGE_BYTES, PAGE_NBYTES, DecodeSide, Setting, behave_like_a_node

BACKENDS = {
    "gloo": TransferOptions(backend="gloo"),
    "tcp": TransferOptions(backend="tcp"),
    "tls": TransferOptions(backend="tcp", kv_tls=True),
}
BATCHES = {16: 8, 256: 1}
"""MiB of a batch of transfers, and how many such batches follow each other in a round."""
ROUNDS = 11


class RawTcp:
    """A connection to a process that sends when told."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._pipe, there = context.Pipe()
            self._child = context.Process(target=send_raw, args=(there, listener.getsockname()), daemon=True)
            self._child.start()
            self._socket = listener.accept()[0]
        self._buffer = memoryview(bytearray(MESSAGE_BYTES))

    def gb_s(self, nbytes: int) -> float:
        """Take in `nbytes`, a multiple of a message."""
        self._pipe.send(nbytes)
        start = time.perf_counter()
        for _ in range(nbytes // MESSAGE_BYTES):
            left = self._buffer
            while left:
                left = left[self._socket.recv_into(left) :]
        return nbytes / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join(20)
        self._socket.close()


def send_raw(pipe: Connection, address: tuple[str, int]) -> None:
    """The child."""
    message = bytes(MESSAGE_BYTES)
    with socket.create_connection(address) as sock:
        while (nbytes := pipe.recv()) is not None:
            for _ in range(nbytes // MESSAGE_BYTES):
                sock.sendall(message)


def main() -> Iterator[dict[str, Any]]:
    """By the size of batches and the transport."""
    behave_like_a_node()
    num_pages = (max(BATCHES) << 20) // PAGE_NBYTES
    with closing(RawTcp()) as raw:
        sides = {
            name: DecodeSide(Setting(options=options, num_pages=num_pages))
            for name, options in BACKENDS.items()
        }
        for mib, num_batches in BATCHES.items():
            path: dict[str, list[float]] = {name: [] for name in sides}
            limit = []
            nbytes = num_batches * mib << 20
            for round_ in range(ROUNDS + 1):
                gb_s = {
                    name: nbytes
                    / sum(side.batch_s((mib << 20) // PAGE_NBYTES) for _ in range(num_batches))
                    / 1e9
                    for name, side in sides.items()
                }
                raw_gb_s = raw.gb_s(nbytes)
                if round_:  # the first is for warming up
                    limit.append(raw_gb_s)
                    for name, rate in gb_s.items():
                        path[name].append(rate)
            for name, rates in path.items():
                yield {
                    "bench": "sockets",
                    "transport": name,
                    "batch_mib": mib,
                    **figure("whole_path_gb_s", rates),
                    **figure("raw_tcp_gb_s", limit),
                    **figure("ratio", ratios(rates, limit)),
                    "rounds": ROUNDS,
                }
        for side in sides.values():
            side.close()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The whole path over raw TCP, of the largest batches."""
    return {f"{row['transport']}_ratio": row["ratio"] for row in rows if row["batch_mib"] == max(BATCHES)}
