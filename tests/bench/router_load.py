"""What a token costs in the router: one router process, fake nodes in a second, clients in a third.

The nodes send one message a step with a token of every sequence, at a set rate. CPU seconds are those of the router's
process (with several workers, of all), kernel and ZMQ's threads included, so that its tokens a second on one core can
be told on a shared machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from shared.protocol.messages import Role
from tests.bench.table import Row
from tests.patience import until
from tests.processes import Router
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import CHAT_TEMPLATE, write_model
from tests.unit.router.stepping_node import ROOMY, SteppingNode

PROMPT = "Say something long about foxes, dogs, and what comes between them."
TEMPLATE = CHAT_TEMPLATE + "{# <tool_call> <think> #}"
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
"""With tools, `calls` reads every answer for calls and reasoning; `chat` reads nothing."""
NUM_TOKENS = {32: 2000, 128: 500, 500: 200}
"""Of each stream, by the number of streams."""
RATES = (10_000, 40_000)
"""Tokens a second, of all streams together: one that a core can serve, and one that it cannot."""
TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class Case:
    """`num_streams` requests of `num_tokens` each, that the nodes serve at `rate` tokens a second together."""

    dialect: str
    num_streams: int
    num_tokens: int
    rate: int

    def request(self, port: int) -> bytes:
        """The bytes of one HTTP request."""
        if self.dialect in ("chat", "calls"):
            path = "/v1/chat/completions"
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": self.num_tokens,
                "ignore_eos": True,
                **({"tools": TOOLS} if self.dialect == "calls" else {"separate_reasoning": False}),
            }
        else:
            path = "/generate"
            sampling = {"max_new_tokens": self.num_tokens, "ignore_eos": True}
            body = {"text": PROMPT, "sampling_params": sampling}
        content = json.dumps({**body, "stream": True}).encode()
        batch = (
            f"{self.dialect}-{self.num_streams}-{self.rate}:{self.num_streams}:{self.num_streams / self.rate}"
        )
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"X-SMG-Routing-Key: {batch}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + content


def main() -> Iterator[dict[str, Any]]:
    """One figure for each dialect, number of streams and rate; then the busiest of them with two workers."""
    with _service(num_workers=1) as router:
        for dialect in ("chat", "calls", "native"):
            for num_streams, num_tokens in NUM_TOKENS.items():
                for rate in RATES:
                    case = Case(dialect=dialect, num_streams=num_streams, num_tokens=num_tokens, rate=rate)
                    yield _figure(case, router, num_workers=1)
    with _service(num_workers=2) as router:
        for num_streams, num_tokens in NUM_TOKENS.items():
            case = Case(dialect="chat", num_streams=num_streams, num_tokens=num_tokens, rate=max(RATES))
            yield _figure(case, router, num_workers=2)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Output tokens a second on one core, of one worker, for each dialect at the most streams."""
    busiest = max(NUM_TOKENS)
    return {
        f"{row['dialect']}_{busiest}_streams_tokens_s_one_core": row["tokens_s_one_core"]
        for row in rows
        if row["workers"] == 1 and row["streams"] == busiest and row["offered_tokens_s"] == min(RATES)
    }


def _figure(case: Case, router: Router, *, num_workers: int) -> dict[str, Any]:
    pids = [str(process.pid) for process in router.family()]
    argv = [sys.executable, "-m", __name__, "clients", json.dumps(asdict(case)), str(router.port), *pids]
    seen = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=TIMEOUT_S).stdout)
    per_1000 = 1000 * seen["cpu_s"] / seen["num_tokens"]
    return {
        "bench": "router",
        "workers": num_workers,
        "dialect": case.dialect,
        "streams": case.num_streams,
        "offered_tokens_s": case.rate,
        "tokens_s": round(seen["num_tokens"] / seen["wall_s"]),
        "tokens_an_event": round(seen["num_tokens"] / seen["num_events"], 2),
        "router_cpu_s_1000_tokens": round(per_1000, 4),
        "tokens_s_one_core": round(1000 / per_1000),
        "event_bytes": round(seen["num_bytes"] / seen["num_events"]),
    }


@contextlib.contextmanager
def _service(*, num_workers: int) -> Iterator[Router]:
    """Fake nodes and a real router."""
    nodes = subprocess.Popen([sys.executable, "-m", __name__, "nodes"], stdout=subprocess.PIPE, text=True)
    try:
        assert nodes.stdout is not None
        joins = json.loads(nodes.stdout.readline())
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
            flags = ("--served-model-name", "tiny", "--local-prefill-tokens", "0")
            more = (
                "--router-workers",
                str(num_workers),
                "--model",
                str(write_model(Path(name) / "model", chat_template=TEMPLATE)),
            )
            with Router(Path(name), *joins, *flags, *more) as router:
                until(lambda: "\nServing " in router.log, "the router serves")
                yield router
    finally:
        nodes.kill()
        nodes.wait()
        if nodes.stdout is not None:
            nodes.stdout.close()


# ------------------------------------------------------------------------------------- the fake nodes' process
async def serve_nodes() -> None:
    """Print the flags by which a router joins them, and serve for ever."""
    async with FakeNode(Role.PREFILL, limits=ROOMY) as prefill, SteppingNode() as decode:
        joins = ("--prefill", prefill.address, "--decode", decode.address)
        print(json.dumps([word.removeprefix("tcp://") for word in joins]), flush=True)
        await asyncio.Event().wait()


# ---------------------------------------------------------------------------------------- the clients' process
@dataclass
class Counts:
    """What all streams have seen together."""

    num_open: int
    num_silent: int
    num_events: int = 0
    num_bytes: int = 0


class Stream(asyncio.Protocol):
    """One request, whose events are counted and not read."""

    def __init__(
        self, request: bytes, counts: Counts, begun: asyncio.Event, over: asyncio.Future[None]
    ) -> None:
        self._request = request
        self._counts = counts
        self._begun = begun
        self._over = over
        self._tail = b""
        self._silent = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._counts.num_bytes += len(data)
        self._counts.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]
        if self._silent and b"data: " in data:
            self._silent = False
            self._counts.num_silent -= 1
            if self._counts.num_silent == 0:
                self._begun.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.num_open -= 1
        if b"data: [DONE]" not in self._tail and not self._over.done():
            self._over.set_exception(AssertionError(f"a stream was cut: {exc!r} {self._tail!r}"))
        elif self._counts.num_open == 0:
            self._over.set_result(None)


async def load(case: Case, port: int, pids: Sequence[int]) -> dict[str, float]:
    """Run all streams; what is counted begins when each has had its first event, from the prefill node."""
    loop, processes = asyncio.get_running_loop(), [psutil.Process(pid) for pid in pids]
    counts = Counts(case.num_streams, case.num_streams)
    begun, over = asyncio.Event(), loop.create_future()
    for _ in range(case.num_streams):
        await loop.create_connection(
            lambda: Stream(case.request(port), counts, begun, over), "127.0.0.1", port
        )
    await asyncio.wait({over, asyncio.create_task(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
    started_at, cpu_before = loop.time(), _cpu_s(processes)
    counts.num_events = counts.num_bytes = 0
    await over
    return {
        "wall_s": loop.time() - started_at,
        "cpu_s": _cpu_s(processes) - cpu_before,
        "num_tokens": case.num_streams * (case.num_tokens - 1),
        "num_events": counts.num_events - case.num_streams,  # without [DONE]
        "num_bytes": counts.num_bytes,
    }


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    if sys.argv[1] == "nodes":
        uvloop.run(serve_nodes())
    else:
        one = Case(**json.loads(sys.argv[2]))
        pids = [int(pid) for pid in sys.argv[4:]]
        print(json.dumps(uvloop.run(load(one, int(sys.argv[3]), pids))))
