"""Wait for the fleet, show that it works, serve until a signal comes: for a router of one process or of several."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from shared import log
from shared.errors import RequestError

PROOF_PROMPT = '''\
def fibonacci(n):
    """Return the n-th Fibonacci number."""
    if n < 2:
        return n
    return'''
PROOF_TOKENS = 24
EXAMPLE_BODY = (
    r'{"prompt": "def read_lines(path):\n    with open(path) as f:\n", "max_tokens": 64, "stream": true}'
)


class Serving(Protocol):
    """A router that has been started. Real: `one_process.RouterProcess`, `parent.RouterParent`."""

    @property
    def url(self) -> str:
        """Where clients reach it from this machine."""
        ...

    @property
    def http_port(self) -> int:
        """The port of it."""
        ...

    @property
    def model_name(self) -> str:
        """What clients call the model; known once it is ready."""
        ...

    @property
    def needs_key(self) -> bool:
        """True when clients must send a key."""
        ...

    @property
    def has_key_files(self) -> bool:
        """True when `reload_keys` can change something."""
        ...

    def reload_keys(self) -> None:
        """Read the files with keys again."""
        ...

    async def ready(self) -> None:
        """Until the fleet is there. Raises ConfigError."""
        ...

    async def prove(self, prompt: str, max_new_tokens: int) -> str:
        """What a prompt is completed with, through both fleets. Raises RequestError."""
        ...

    async def broken(self) -> None:
        """Until a part that should run for ever ends; raises what ended it."""
        ...

    def kill(self) -> None:
        """Do not wait for the processes that it started."""
        ...


async def serve(router: Serving, *, owns_nodes: bool) -> int:
    """Prove that it works, and serve until a signal comes. Returns the exit code."""
    stop = stop_on_signals(router.kill)
    if router.has_key_files:  # else SIGHUP ends the process, as it should when its terminal is closed
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload_keys)
    if await unless(stop, _start(router, owns_nodes=owns_nodes)):
        await unless(stop, router.broken())
    if sys.stdout.isatty():
        print("\nstopping ...", flush=True)
    return 0


def stop_on_signals(kill: Callable[[], None]) -> asyncio.Event:
    """Set by the first SIGTERM or Ctrl-C; the second does not wait for anybody."""
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


async def _start(router: Serving, *, owns_nodes: bool) -> None:
    """Wait for the fleet and show that it works. A joined fleet may come right later; one's own must work now."""
    await router.ready()
    log.event("router_ready", url=router.url, http_port=router.http_port)
    proof = ""
    try:  # printed in one piece, since the nodes write their events to the same terminal
        proof = await router.prove(PROOF_PROMPT, PROOF_TOKENS)
    except RequestError as e:
        if owns_nodes:
            raise
        log.warn("first_generation_failed", reason=e.message)
    key = " -H 'Authorization: Bearer KEY'" if router.needs_key else ""
    if proof:
        print(f"\n{PROOF_PROMPT}{proof}")
    print(
        f"\nServing {router.model_name} at {router.url}: open it in a browser, or try:\n\n"
        f"  curl -N {router.url}/v1/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{EXAMPLE_BODY}'\n",
        flush=True,
    )
