"""`python -m router.demo`: start everything on free ports, stream one completion, show where its time went, stop.

The last line on standard output is one JSON object, for scripts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import uvloop

from router.config import RouterConfig
from router.flags import build_parser, router_config
from router.processes.child_process import ChildFailed
from router.processes.supervisor import Supervisor
from shared import log
from shared.errors import ConfigError

PROMPT = '''\
class Stack:
    """A last-in, first-out collection."""

    def __init__(self):
        self._items = []
'''
MAX_NEW_TOKENS = 48
SILENCE_S = 60.0
"""Longest wait for the next event."""
SHOWN = ("prompt_tokens", "completion_tokens", "kv_pages_transferred", "kv_bytes_transferred")


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
    except (ConfigError, ChildFailed, OSError) as e:
        print(f"demo: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def demo(config: RouterConfig, flags: Sequence[str]) -> int:
    """Start the nodes, stream one completion, and stop them."""
    async with Supervisor(config, flags, router_stdout=subprocess.DEVNULL) as supervisor:
        await supervisor.start()
        key = next(iter((*config.http.api_keys, *config.http.admin_api_keys)), None)
        print(PROMPT, end="", flush=True)
        summary = await asyncio.to_thread(stream, config.http.url(supervisor.http_port), key)
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def stream(url: str, key: str | None) -> dict[str, Any]:
    """Send the request, show its text as it comes and then its stages, and sum it up. Raises OSError."""
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0}
    body = {"text": PROMPT, "sampling_params": sampling, "stream": True, "return_timeline": True}
    text, info, ttft_s, last_s, started = "", {}, 0.0, 0.0, time.monotonic()
    for event in events(f"{url}/generate", key, body):
        last_s = time.monotonic() - started
        ttft_s = ttft_s or last_s
        print(event["text"][len(text) :], end="", flush=True)
        text, info = event["text"], event["meta_info"]
    stamps = info["timeline"]
    print("\n\nWhere its time went:\n")
    for at, stamp in enumerate(stamps):
        until = next((later for later in stamps[at + 1 :] if later["role"] == stamp["role"]), None)
        lasted = f"for {1000 * (until['time'] - stamp['time']):7.1f} ms" if until else ""
        began_ms = 1000 * (stamp["time"] - stamps[0]["time"])
        print(f"{stamp['role']:<9}{stamp['stage']:<16}at {began_ms:7.1f} ms  {lasted}")
    print(f"\n{info['kv_pages_transferred']} KV pages, {info['kv_bytes_transferred']:,} bytes moved")
    tpot_s = (last_s - ttft_s) / max(1, info["completion_tokens"] - 1)
    times = {"ttft_s": round(ttft_s, 6), "tpot_s": round(tpot_s, 6)}
    return {"text": text, **{name: info[name] for name in SHOWN}, **times}


def events(url: str, key: str | None, body: object) -> Iterator[dict[str, Any]]:
    """The events of a POST's stream. Raises OSError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, msgspec.json.encode(body), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=SILENCE_S) as response:
        for line in response:
            payload = line.removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                event = msgspec.json.decode(payload)
                if "error" in event:
                    raise OSError(event["error"]["message"])
                yield event


if __name__ == "__main__":
    sys.exit(main())
