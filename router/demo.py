"""`python -m router.demo`: start everything on free ports, stream one completion, show where its time went, stop.

The last line on standard output is one JSON object, for scripts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from router.flags import build_parser, router_config
from router.http.config import RouterConfig
from router.processes.child_process import ChildFailed
from router.processes.supervisor import Supervisor
from shared import log
from shared.errors import ConfigError

PROMPT = '''\
class Stack:
    """A last-in, first-out collection."""

    def __init__(self):
        self._items = []

    def push(self, item):
        """Put an item on top."""
        self._items.append(item)

    def pop(self):
        """Take the item from the top."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()

    def __len__(self):
'''
MAX_NEW_TOKENS = 48
SILENCE_S = 60.0
"""Longest wait for the next event."""


class DemoError(Exception):
    """The completion did not succeed; the message is for people."""


@dataclass
class Completion:
    """The stream so far. `arrivals` are in seconds since the request was sent."""

    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens."""
        num_later = max(1, self.meta_info["completion_tokens"] - 1)
        return (self.arrivals[-1] - self.ttft_s) / num_later if self.arrivals else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; flags are the router's."""
    flags = ["--port", "0", "--log-level", "warning", *(sys.argv[1:] if argv is None else argv)]
    args = build_parser().parse_args(flags)
    log.setup(args.log_level, "router")
    try:
        config = router_config(args)
        if not config.fleet.local.node_ids():
            raise ConfigError("the demo starts its own nodes: give --local, not --prefill or --decode")
        return uvloop.run(demo(config, flags))
    except (ConfigError, DemoError, ChildFailed) as e:
        print(f"demo: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def demo(config: RouterConfig, flags: Sequence[str]) -> int:
    """Start the nodes, stream one completion, and stop them."""
    console = Console()
    async with Supervisor(
        config, flags, Console(stderr=True), router_stdout=subprocess.DEVNULL
    ) as supervisor:
        await supervisor.start()
        key = next(iter((*config.http.api_keys, *config.http.admin_api_keys)), None)
        url = config.http.url(supervisor.http_port)
        console.print(PROMPT, end="", style="dim", markup=False, highlight=False)
        completion = await asyncio.to_thread(stream, url, key, console)
        console.print("\n")
        info = completion.meta_info
        stages = [(stamp["role"], stamp["stage"], stamp["time"]) for stamp in info["timeline"]]
        console.print(stage_table(stages, info["kv_pages_transferred"], info["kv_bytes_transferred"]))
    counts = ("prompt_tokens", "completion_tokens", "kv_pages_transferred", "kv_bytes_transferred")
    summary = {
        "text": completion.text,
        **{name: info[name] for name in counts},
        "ttft_s": round(completion.ttft_s, 6),
        "tpot_s": round(completion.tpot_s, 6),
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def stream(url: str, key: str | None, console: Console) -> Completion:
    """Send the request and show its text as it comes. Raises DemoError."""
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0}
    body = {"text": PROMPT, "sampling_params": sampling, "stream": True, "return_timeline": True}
    completion, started = Completion(), time.monotonic()
    for event in events(f"{url}/generate", key, body):
        completion.arrivals.append(time.monotonic() - started)
        console.print(event["text"][len(completion.text) :], end="", markup=False, highlight=False)
        completion.text, completion.meta_info = event["text"], event["meta_info"]
    return completion


def events(url: str, key: str | None, body: object) -> Iterator[dict[str, Any]]:
    """The events of a POST's stream. Raises DemoError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, msgspec.json.encode(body), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SILENCE_S) as response:
            for line in response:
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return
                if payload:
                    event = msgspec.json.decode(payload)
                    if "error" in event:
                        raise DemoError(event["error"]["message"])
                    yield event
    except urllib.error.HTTPError as e:
        raise DemoError(f"{url} answered {e.code}: {e.read().decode(errors='replace')}") from None
    except OSError as e:
        raise DemoError(f"{url}: {e}") from None
    raise DemoError(f"{url} ended the stream")


def stage_table(stages: Sequence[tuple[str, str, float]], kv_pages: int, kv_bytes: int) -> Table:
    """The stages of a request (role, stage, time) in order of time, and what was transferred."""
    table = Table(title="Where its time went", title_justify="left")
    for name in ("node", "stage", "at", "for"):
        table.add_column(name, justify="right" if name in ("at", "for") else "left")
    for at, (role, stage, entered) in enumerate(stages):
        until = next((later for later in stages[at + 1 :] if later[0] == role), None)
        lasted = _milliseconds(until[2] - entered) if until and role != "router" else ""
        table.add_row(role, stage, _milliseconds(entered - stages[0][2]), lasted)
    table.caption = f"{kv_pages} KV pages, {kv_bytes:,} bytes moved"
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
