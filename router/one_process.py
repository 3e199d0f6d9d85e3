"""`router` in a single process: one `Router`, and the `NodeHost` that brings it nodes.

async with RouterProcess(config, console, model) as router:   sockets are bound, HTTP answers, nodes are starting
    await router.ready()                                      the fleet is there; ConfigError when it cannot be
    ...
                                                              requests are failed, nodes told, children stopped
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from rich.console import Console

from router.http.api_keys import warn_if_open
from router.http.config import RouterConfig
from router.http.http_socket import listen_http
from router.nodes.node_host import NodeHost
from router.request.generation import Generation
from router.server import Router
from router.text.served_model import ModelSlot, ServedModel
from shared.log import event


class RouterProcess:
    """An async context manager. Its ports are known inside the block."""

    def __init__(self, config: RouterConfig, console: Console, model: ServedModel | None) -> None:
        self._config = config
        self._router = Router(config, model)
        self._host = NodeHost(config, console, on_lobby=self._router.on_lobby, on_gone=self._router.retire)
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RouterProcess:
        """Bind, serve and start; what was started is stopped again if this fails."""
        config = self._config
        config.check()
        async with contextlib.AsyncExitStack() as exits:
            http_socket = listen_http(config.http.host, config.http.port)
            exits.callback(http_socket.close)
            await exits.enter_async_context(self._host)
            await exits.enter_async_context(self._router)
            await self._host.start_nodes()
            self._listening = asyncio.create_task(self._host.listen(), name="lobby")
            exits.push_async_callback(self._stop_listening)
            exits.push_async_callback(self._router.stop_serving)
            await self._router.serve(http_socket)
            warn_if_open(self._router.keys, config.http.host)
            event(
                "router_listening",
                http_port=self.http_port,
                control_port=self.control_port,
                incarnation=self._router.incarnation,
            )
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything, in the reverse order of its start."""
        await self._exits.aclose()

    @property
    def model(self) -> ModelSlot:
        """What is served."""
        return self._router.model

    @property
    def model_name(self) -> str:
        """See serving.Serving."""
        return self._router.model.name()

    @property
    def has_key_files(self) -> bool:
        """See serving.Serving."""
        return self._router.keys.has_files

    def reload_keys(self) -> None:
        """See serving.Serving."""
        self._router.keys.reload()

    @property
    def needs_key(self) -> bool:
        """True when clients must send the API key."""
        return self._router.needs_key

    @property
    def url(self) -> str:
        """Where clients reach it from this machine."""
        return self._config.http.url(self.http_port)

    @property
    def http_port(self) -> int:
        """Where clients reach it."""
        return self._router.http_port

    @property
    def control_port(self) -> int:
        """Where nodes announce themselves."""
        return self._host.control_port

    async def ready(self) -> None:
        """Until every local node serves, or a joined fleet can serve something. Raises ConfigError."""
        with self._host.progress():
            await self._router.ready(self._host.node_ids)

    async def prove(self, prompt: str, max_new_tokens: int) -> str:
        """See serving.Serving."""
        return await self._router.prove(prompt, max_new_tokens)

    def stream(self, text: str, max_new_tokens: int) -> AsyncIterator[tuple[Generation, str]]:
        """See `Router.stream`."""
        return self._router.stream(text, max_new_tokens)

    async def broken(self) -> None:
        """Until a part that should run for ever ends; raises what ended it."""
        serving = asyncio.create_task(self._router.broken())
        try:
            await asyncio.wait({serving, self._listening}, return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, self._listening):
                if task.done():
                    task.result()
        finally:
            serving.cancel()
        raise RuntimeError("the control port ended by itself")

    def kill(self) -> None:
        """Do not wait for the nodes any longer."""
        self._host.kill_nodes()

    async def _stop_listening(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
