"""`python -m router.processes.router_process INDEX HTTP_PORT first|restarted FLAGS...`: one router.

Only the supervisor starts it; FLAGS are the supervisor's.
Standard input is a socket: the supervisor's feed, and the way back for a heartbeat. When it closes, the supervisor is
gone, and this process ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Sequence

import uvloop

from router.config import RouterConfig
from router.flags import build_parser, router_config
from router.http.http_socket import bind_http, listen_http, start_listening
from router.processes.child_process import HEARTBEAT, HEARTBEAT_S, LOADED, READY
from router.processes.feed import Listed, LogKey, NodeExited, receive
from router.processes.stopping import stop_on_signals, unless
from router.server import Router, load_model
from shared import log
from shared.errors import ConfigError, RequestError

PROOF_PROMPT = '''\
def fibonacci(n):
    """Return the n-th Fibonacci number."""
    if n < 2:
        return n
    return'''
PROOF_TOKENS = 24
EXAMPLE = (
    "/v1/completions",
    r'{"prompt": "def read_lines(path):\n    with open(path) as f:\n", "max_tokens": 64, "stream": true}',
)
EXAMPLE_OF_IDS = (
    "/generate",
    '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 64}, "stream": true}',
)
"""For a router without a tokenizer."""

_YOUNG_OBJECTS = 50_000
_CAN_SERVE_S = 5.0
"""A router that was started again listens after this time, even if it has found no node that could serve."""


def main(argv: Sequence[str]) -> int:
    """Serve until the supervisor says that it is enough, or is gone.

    Returns 0, or a code of `child_process.GAVE_UP`: 2 for a wrong flag or model, 3 for a failed first generation.
    """
    index, http_port, life, *flags = argv
    args = build_parser().parse_args(flags)
    log.setup(args.log_level, f"router-{index}")
    try:
        return uvloop.run(_run(router_config(args), int(index), int(http_port), first=life == "first"))
    except ConfigError as e:
        print(f"router: error: {e}", file=sys.stderr)
        return 2
    except RequestError as e:
        print(f"router: error: the first generation failed: {e.message}", file=sys.stderr)
        return 3


async def _run(config: RouterConfig, index: int, http_port: int, *, first: bool) -> int:
    stop = stop_on_signals(lambda: os._exit(1))
    stdin = socket.fromfd(sys.stdin.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    feed, supervisor = await asyncio.open_unix_connection(sock=stdin)
    http = config.http
    with contextlib.closing(supervisor), contextlib.ExitStack() as sockets:
        model = load_model(config.model, config) if config.model is not None else None
        collect_rarely()
        own = sockets.enter_context(listen_http("127.0.0.1", http.own_port(index)))
        shared = sockets.enter_context(bind_http(http.host, http_port, shared=True))
        async with Router(config, model, index) as router:
            supervisor.write(LOADED)
            tasks = [asyncio.create_task(_pass_on(feed, router)), asyncio.create_task(_beat(supervisor))]
            try:
                if await unless(stop, _serve(router, config, index, shared, own, first=first)):
                    supervisor.write(READY)
                    await unless(stop, router.broken())
                    await router.drain()
            finally:
                await router.stop_serving()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return 0


async def _serve(
    router: Router,
    config: RouterConfig,
    index: int,
    shared: socket.socket,
    own: socket.socket,
    *,
    first: bool,
) -> None:
    """Listen, and wait for the fleet. A router that is started again waits first: others serve meanwhile."""
    if not first:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CAN_SERVE_S):
                await router.ready()
    start_listening(shared)
    await router.serve(shared, own)
    local = [node_id for _, node_id in config.fleet.local.node_ids()]
    if first and index == 0:
        await router.ready(local)
        await _prove(router, owns_nodes=bool(local))
    else:
        await router.ready()


async def _prove(router: Router, *, owns_nodes: bool) -> None:
    """Complete a prompt and print it. Local nodes must work now; joined ones may work later."""
    log.event("router_ready", url=router.url, http_port=router.http_port)
    proof = ""
    try:  # printed in one piece, since the nodes write their events to the same terminal
        proof = await router.prove(PROOF_PROMPT, PROOF_TOKENS)
    except RequestError as e:
        if owns_nodes:
            raise
        log.warn("first_generation_failed", reason=e.message)
    key = " -H 'Authorization: Bearer KEY'" if router.keys.has_clients else ""
    path, body = EXAMPLE if router.model.get().tokenizer.has_text else EXAMPLE_OF_IDS
    if proof:
        print(f"\n{PROOF_PROMPT}{proof}")
    print(
        f"\nServing {router.model.name()} at {router.url}: open it in a browser, or try:\n\n"
        f"  curl -N {router.url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{body}'\n",
        flush=True,
    )


def collect_rarely() -> None:
    """Exclude loaded objects from collection, and collect others after many more allocations than by default.

    Every step of a node allocates some thousand objects that reference counts free at once. At the default of 700,
    collecting took a fifth of the router's time (500 streams, 1 core).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)


async def _pass_on(feed: asyncio.StreamReader, router: Router) -> None:
    """Pass the supervisor's messages to the router. The process ends at once when the supervisor is gone."""
    try:
        while True:
            match await receive(feed):
                case NodeExited(node_id, role, reason, crashed):
                    router.membership.node_exited(node_id, role, reason, crashed=crashed)
                case Listed(addresses):
                    router.membership.on_listing(addresses)
                case LogKey(key):
                    router.log_hasher.use(key)
                case message:
                    router.membership.on_announcement(message)
    except (asyncio.IncompleteReadError, ConnectionError) as e:
        log.event("supervisor_gone", reason=e)
    except Exception:
        log.crash("feed_failed")
    os._exit(1)


async def _beat(supervisor: asyncio.StreamWriter) -> None:
    """Show the supervisor that the event loop turns."""
    while True:
        supervisor.write(HEARTBEAT)
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
