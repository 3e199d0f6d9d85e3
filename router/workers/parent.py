"""`router --router-workers N`: the parent of N processes, each of which is a full router on the same port.

    parent                    the control port, local nodes, the HTTP port's reservation, workers that come and go
    └─ worker 0 .. N - 1      HTTP, tokenizer, connections to all nodes: to a node, a router like any other

The kernel spreads connections over the workers that listen (SO_REUSEPORT); the parent accepts none and sees no
request. What must hold for all workers goes over the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console

from router.bus.worker_messages import NotDone, Proof, Prove
from router.http.api_keys import api_keys, warn_if_open
from router.http.config import RouterConfig
from router.http.http_socket import reserve_http
from router.nodes.node_host import NodeHost
from router.workers.worker_pool import Workers
from shared.errors import RequestError
from shared.log import event
from shared.model.files import resolve_model
from shared.protocol.messages import NodeToLobby

_PROOF_TIMEOUT_S = 600.0


class RouterParent:
    """An async context manager (a `serving.Serving`). `flags` are those that `config` was read from."""

    def __init__(self, config: RouterConfig, flags: Sequence[str], console: Console) -> None:
        self._config = config
        self._flags = flags
        self._keys = api_keys(config.http)
        self._host = NodeHost(config, console, on_lobby=self._on_lobby, on_gone=self._on_gone)
        self._exits = contextlib.AsyncExitStack()
        self.http_port = 0
        self.model_name = ""

    async def __aenter__(self) -> RouterParent:
        """Bind, and start workers and nodes; what was started is stopped again if this fails."""
        config = self._config
        config.check()
        if config.model is not None:
            resolve_model(config.model, with_weights=False)  # once, before N workers do
        async with contextlib.AsyncExitStack() as exits:
            reserved = reserve_http(config.http.host, config.http.port)
            exits.callback(reserved.close)
            self.http_port = reserved.getsockname()[1]
            await exits.enter_async_context(self._host)
            self._workers = Workers(
                config.router_workers,
                self._flags,
                http_port=self.http_port,
                join=config.fleet.join,
                node_ids=self._host.node_ids,
            )
            self._workers.start()
            exits.push_async_callback(self._workers.stop, config.dispatch.stop_timeout_s)
            await self._workers.loaded()  # what can go wrong at once must not start nodes first
            await self._host.start_nodes()
            self._listening = asyncio.create_task(self._host.listen(), name="lobby")
            exits.push_async_callback(self._stop_listening)
            warn_if_open(self._keys, config.http.host)
            event(
                "router_listening",
                http_port=self.http_port,
                control_port=self._host.control_port,
                workers=config.router_workers,
            )
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the workers, then the nodes."""
        await self._exits.aclose()

    @property
    def url(self) -> str:
        """See serving.Serving."""
        return self._config.http.url(self.http_port)

    @property
    def needs_key(self) -> bool:
        """See serving.Serving."""
        return self._keys.needed

    @property
    def has_key_files(self) -> bool:
        """See serving.Serving."""
        return self._keys.has_files

    def reload_keys(self) -> None:
        """See serving.Serving."""
        self._workers.reload_keys()

    async def ready(self) -> None:
        """Until every worker has seen the fleet. Raises ConfigError."""
        with self._host.progress():
            self.model_name = await self._workers.ready()

    async def prove(self, prompt: str, max_new_tokens: int) -> str:
        """See serving.Serving."""
        match await self._workers.ask_one(Prove(prompt, max_new_tokens), _PROOF_TIMEOUT_S):
            case Proof(text):
                return text
            case NotDone(reason):
                raise RequestError(reason, status=503)
            case other:
                raise RuntimeError(f"a worker has answered with {type(other).__name__}")

    async def broken(self) -> None:
        """See serving.Serving."""
        keeping = asyncio.create_task(self._workers.broken())
        try:
            await asyncio.wait({keeping, self._listening}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, self._listening):
                if task.done():
                    task.result()
        finally:
            keeping.cancel()

    def kill(self) -> None:
        """See serving.Serving."""
        self._workers.kill("told twice to stop")
        self._host.kill_nodes()

    def _on_lobby(self, message: NodeToLobby) -> None:
        self._workers.on_lobby(message)

    def _on_gone(self, node_id: str, reason: str) -> None:
        self._workers.on_gone(node_id, reason)

    async def _stop_listening(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
