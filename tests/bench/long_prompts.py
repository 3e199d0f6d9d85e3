"""What prompts of 100,000 tokens do to a stream beside them: one router process, fake nodes in a second.

The nodes send the stream a token every 10 ms. Meanwhile two clients post a long prompt a second each.

    gap_ms    the largest time between two tokens at the client
    lag_ms    how late the router's event loop woke for a timer, at worst; `lags`: how often by more than 10 ms
    cpu_ms    the most CPU time that the loop's thread spent between two wakes, which no other process adds to

Gaps and lags include what else the machine does: compare with the row for nothing. With n 16, the gaps are those of
the fake node, which decodes the prompt 32 times.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from router.http.config import DispatchOptions, FleetOptions, HttpOptions, RouterConfig
from router.http.topology import LocalTopology
from shared.protocol.messages import Decode, Finish, NodeLimits, Prefill, Role
from tests.bench.table import Row
from tests.unit.router.fakes import STORY, FakeNode, byte_level_tokenizer, serving_router, write_model

NUM_TOKENS = 100_000
SECONDS = 6.0
STEP_S = 0.01
NUM_POSTERS = 2
EVERY_S = 1.0
STEADY = "steady"
ROOMY = NodeLimits(context_length=1 << 20, max_total_num_tokens=1 << 24, max_running_requests=4096)
LAG_TIMER_S = 0.002
LATE_S = 0.010

Post = tuple[str, dict[str, Any]]


def main() -> Iterator[dict[str, Any]]:
    """One row for each kind of long prompt, after one for none."""
    ids = byte_level_tokenizer().encode(STORY * 6000).ids[:NUM_TOKENS]
    text = byte_level_tokenizer().decode(ids, skip_special_tokens=False)
    once = {"max_new_tokens": 2}
    posts: dict[str, Post | None] = {
        "nothing": None,
        "text": ("/generate", {"text": text, "sampling_params": once}),
        "ids": ("/generate", {"input_ids": ids, "sampling_params": once}),
        "ids, n 16": ("/generate", {"input_ids": ids, "sampling_params": {**once, "n": 16}}),
        "batch of 64 texts": ("/generate", {"text": [text[:8000]] * 64, "sampling_params": once}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        "echo of ids": ("/v1/completions", {"prompt": ids, "echo": True, "max_tokens": 2}),
        "tokenize": ("/tokenize", {"prompt": text}),
        "detokenize": ("/detokenize", {"tokens": ids}),
    }
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as exits:
        write_model(Path(folder), context_length=ROOMY.context_length)
        addresses = exits.enter_context(_process("nodes")).readline()
        router = exits.enter_context(_process("router", folder, addresses))
        port = int(router.readline())
        for name, post in posts.items():
            yield {"bench": "long_prompts", "posted": name, "tokens": len(ids), **_figure(port, router, post)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The largest gap of a stream beside nothing, and beside the worst kind of long prompt."""
    worst = max(rows[1:], key=lambda row: row["gap_ms"])
    return {"quiet_gap_ms": rows[0]["gap_ms"], "worst_gap_ms": worst["gap_ms"], "worst": worst["posted"]}


def _figure(port: int, router: _Lines, post: Post | None) -> dict[str, Any]:
    stop, latencies_s = threading.Event(), list[float]()
    body = b"" if post is None else json.dumps(post[1]).encode()

    def keep_posting() -> None:
        assert post is not None
        while not stop.is_set():
            started = time.perf_counter()
            _post(port, post[0], body)
            latencies_s.append(time.perf_counter() - started)
            stop.wait(max(0.0, EVERY_S - latencies_s[-1]))

    posters = [threading.Thread(target=keep_posting) for _ in range(NUM_POSTERS if post else 0)]
    router.ask("lag")
    gaps = _stream(port, lambda: [poster.start() for poster in posters])
    stop.set()
    lag = json.loads(router.ask("lag"))
    for poster in posters:
        poster.join()
    return {
        "posts": len(latencies_s),
        "latency_ms": round(1e3 * max(latencies_s, default=0)),
        "gap_p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 1),
        "gap_ms": round(1e3 * gaps[-1], 1),
        **lag,
    }


def _stream(port: int, on_first: Callable[[], object]) -> list[float]:
    """The times between the events of a stream, in order of size."""
    sampling = {"max_new_tokens": int(SECONDS / STEP_S), "ignore_eos": True}
    body = {"prompt": "Tell me", "max_tokens": sampling["max_new_tokens"], "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": STEADY}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response, last, gaps = connection.getresponse(), None, []
    for line in response:
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            gaps += [] if last is None else [now - last]
            if last is None:
                on_first()
                now = time.perf_counter()
            last = now
    connection.close()
    return sorted(gaps)


def _post(port: int, path: str, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer[:300]
    connection.close()


class _Lines:
    """The standard streams of a process."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen

    def readline(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def ask(self, question: str) -> str:
        assert self._popen.stdin is not None
        self._popen.stdin.write(question + "\n")
        self._popen.stdin.flush()
        return self.readline()


@contextmanager
def _process(*argv: str) -> Iterator[_Lines]:
    command = [sys.executable, "-m", __name__, *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield _Lines(popen)
        finally:
            popen.kill()


async def _nodes() -> None:
    async def first(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:1])

    async def rest(node: FakeNode, message: Prefill | Decode) -> None:
        wanted, begin = message.work.params.max_new_tokens, time.monotonic()
        for position in range(wanted):
            if message.work.routing_key == STEADY:
                await asyncio.sleep(max(0.0, begin + position * STEP_S - time.monotonic()))
            finish = Finish("length") if position == wanted - 1 else None
            node.tokens(message.key, position, node.story[position % 20 : position % 20 + 1], finish)

    async with (
        FakeNode(Role.PREFILL, script=first, limits=ROOMY) as prefill,
        FakeNode(Role.DECODE, script=rest, limits=ROOMY) as decode,
    ):
        print(prefill.address, decode.address, flush=True)
        await asyncio.Event().wait()


async def _router(folder: str, addresses: str) -> None:
    roles = zip((Role.PREFILL, Role.DECODE), addresses.split(), strict=True)
    config = RouterConfig(
        model=folder,
        fleet=FleetOptions(local=LocalTopology(0, 0), join=tuple(roles), control_port=0),
        http=HttpOptions(port=0),
        dispatch=DispatchOptions(local_prefill_tokens=0),
    )
    async with serving_router(config) as router:
        await router.ready()
        print(router.http_port, flush=True)
        lags: list[tuple[float, float]] = []
        measuring = asyncio.create_task(_measure(lags))
        while await asyncio.to_thread(sys.stdin.readline):
            told = {
                "lag_ms": round(1e3 * max((lag for lag, _ in lags), default=0.0), 1),
                "lags": sum(lag > LATE_S for lag, _ in lags),
                "cpu_ms": round(1e3 * max((cpu for _, cpu in lags), default=0.0), 1),
            }
            print(json.dumps(told), flush=True)
            lags.clear()
        measuring.cancel()


async def _measure(lags: list[tuple[float, float]]) -> None:
    while True:
        before, cpu_before = time.perf_counter(), time.thread_time()
        await asyncio.sleep(LAG_TIMER_S)
        lags.append((time.perf_counter() - before - LAG_TIMER_S, time.thread_time() - cpu_before))


if __name__ == "__main__":
    uvloop.run(_nodes() if sys.argv[1] == "nodes" else _router(sys.argv[2], sys.argv[3]))
