"""A router from its first socket to its last child: builds the parts, starts them, and takes them down in order.

async with Router(config, console) as router:   sockets are bound, HTTP answers, nodes are starting
    await router.ready()                        the fleet is there; ConfigError when it cannot be
    ...
                                                running requests are failed, nodes told, children stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any

import zmq.asyncio
from rich.console import Console

from router.api_keys import Access, ApiKeys, KeySource
from router.app import Service, create_app
from router.config import RouterConfig
from router.conversation import Timing
from router.dispatch import Deadlines, Dispatcher
from router.generate_api import HttpLimits
from router.generation import Generation, Generator, Prompt
from router.http_server import HttpServer, bind_http, http_server
from router.live_rids import LiveRids
from router.load_progress import LoadProgress
from router.lobby import Lobby
from router.local import LocalFleet, LocalNode
from router.membership import Membership, MemberState
from router.metrics import Metrics
from router.policy import RoundRobin
from router.sampling import Sampling
from router.served_model import ModelSlot, ServedModel
from router.status import FleetStatus
from shared.errors import ConfigError
from shared.log import event
from shared.model.files import resolve_model
from shared.protocol.messages import NodeToLobby, Role
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.security import FleetKey

STOPPING = "the router is shutting down"
_WAIT_FOR_PREFILL_S = 5.0


class Router:
    """All parts of one router, as an async context manager. Its ports are known inside the block."""

    def __init__(self, config: RouterConfig, console: Console, model: ServedModel | None) -> None:
        self._config = config
        self._console = console
        self._exits = contextlib.AsyncExitStack()
        self._progress: LoadProgress | None = None
        self._local: LocalFleet | None = None
        self._background: list[asyncio.Task[None]] = []
        self.model = ModelSlot(model)
        self.http_port = 0
        self.control_port = 0

    async def __aenter__(self) -> Router:
        """Bind, serve and start; what was started is stopped again if this fails."""
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything, in the reverse order of its start."""
        await self._exits.aclose()

    @property
    def needs_key(self) -> bool:
        """True when clients must send the API key."""
        return self.keys.access(b"") is Access.NOTHING

    @property
    def url(self) -> str:
        """Where clients reach it from this machine."""
        host = self._config.http.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{self.http_port}" if ":" in host else f"http://{host}:{self.http_port}"

    async def ready(self) -> None:
        """Until every local node serves, or a joined fleet can serve something. Raises ConfigError."""
        if self._local is None:
            await self._joined()
            return
        node_ids = [node_id for _, node_id in self._config.fleet.local.node_ids()]
        with LoadProgress(self._console, node_ids) as self._progress:
            while not self._all_local_nodes_serve(node_ids):
                await self._membership.changed()
        self._progress = None

    async def stream(self, text: str, max_new_tokens: int) -> AsyncIterator[tuple[Generation, str]]:
        """One greedy completion through both fleets, as proof that they work. Raises RequestError."""
        model = self.model.get()
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        input_ids = (await model.tokenizer.encode([text]))[0]
        prompt = Prompt(
            rid=f"proof-{secrets.token_hex(4)}",
            input_ids=tuple(input_ids),
            sampling=Sampling(params=params),
            split=True,
        )
        with Generator(self._dispatcher, LiveRids()).open([prompt], model.tokenizer) as group:
            async for step in group.steps():
                yield step

    async def broken(self) -> None:
        """Until a part that should run for ever ends; raises what ended it."""
        done, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError(f"{', '.join(task.get_name() for task in done)} ended by itself")

    def kill_local_nodes(self) -> None:
        """Do not wait for them any longer."""
        if self._local is not None:
            self._local.kill()

    # ------------------------------------------------------------------------------------------ inside
    async def _start(self) -> None:
        config, exits = self._config, self._exits
        config.check()
        self.keys = api_keys(config)
        fleet_key = FleetKey.load(config.fleet.fleet_key) if config.fleet.fleet_key else None
        http_socket = bind_http(config.http.host, config.http.port)
        exits.callback(http_socket.close)
        self.http_port = http_socket.getsockname()[1]
        context = zmq.asyncio.Context()
        exits.callback(context.destroy)
        if fleet_key is not None:
            exits.callback(fleet_key.authenticator(context).stop)
        lobby = Lobby(context, fleet_key)
        exits.callback(lobby.close)
        self.control_port = lobby.bind(config.fleet.control_host, config.fleet.control_port)

        incarnation = secrets.token_hex(6)
        options = config.dispatch
        self._membership = Membership(
            context,
            incarnation=incarnation,
            fleet_key=fleet_key,
            timing=Timing(node_timeout_s=options.node_timeout_s),
        )
        exits.push_async_callback(self._membership.close)
        metrics = Metrics(self.model.name)
        metrics.watch(self._membership.all_live)
        self._dispatcher = Dispatcher(
            self._membership,
            incarnation=incarnation,
            prefill_policy=RoundRobin(),
            decode_policy=RoundRobin(),
            deadlines=Deadlines(first_token_s=options.queue_timeout_s, stall_s=options.stall_timeout_s),
            local_prefill_tokens=options.local_prefill_tokens,
            metrics=metrics,
        )
        self._membership.report_to(self._dispatcher)
        self._status = FleetStatus(self._membership, self.model)
        exits.callback(self._close_model)

        await self._start_nodes()
        self._exits.push_async_callback(self._stop_background)
        self._spawn(lobby.listen(self._on_lobby), "lobby")
        self._serve_http(http_socket, metrics)
        event(
            "router_listening",
            http_port=self.http_port,
            control_port=self.control_port,
            incarnation=incarnation,
        )

    async def _start_nodes(self) -> None:
        fleet = self._config.fleet
        for role, address in fleet.join:
            self._membership.dial(address, role, pinned=True)
        if not fleet.local.node_ids():
            return
        host = "127.0.0.1" if fleet.control_host in ("0.0.0.0", "::", "localhost") else fleet.control_host
        host = f"[{host}]" if ":" in host else host
        self._local = LocalFleet(
            fleet.local,
            control_address=f"{host}:{self.control_port}",
            node_argv=fleet.node_argv,
            on_exit=self._on_local_exit,
        )
        self._exits.push_async_callback(self._local.stop, self._config.dispatch.stop_timeout_s)
        await self._local.start()

    def _serve_http(self, http_socket: socket.socket, metrics: Metrics) -> None:
        http = self._config.http
        app = create_app(
            Service(
                model=self.model,
                membership=self._membership,
                dispatcher=self._dispatcher,
                metrics=metrics,
                status=self._status,
                limits=HttpLimits(max_body_bytes=http.max_body_bytes, max_batch_size=http.max_batch_size),
                keys=self.keys,
                flags=self._config.shown(),
            )
        )
        server = http_server(app)
        serving = self._spawn(server.serve(sockets=[http_socket]), "http")
        self._exits.push_async_callback(self._stop_http, server, serving)

    async def _stop_http(self, server: HttpServer, serving: asyncio.Task[None]) -> None:
        """First of all: nothing new is taken, what runs ends with an answer, and nodes hear that it ended."""
        self._status.stopping = True
        self._dispatcher.close(STOPPING)
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await self._membership.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.append(task)
        return task

    async def _stop_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _on_lobby(self, message: NodeToLobby) -> None:
        if self._local is not None:
            self._local.on_lobby(message)
        if self._progress is not None:
            self._progress.on_lobby(message)
        self._membership.on_lobby(message)

    def _on_local_exit(self, node: LocalNode) -> None:
        self._membership.retire(node.node_id, node.epitaph)

    def _all_local_nodes_serve(self, node_ids: list[str]) -> bool:
        assert self._local is not None
        for node in self._local.nodes:
            if node.exit_code is not None or node.failure:
                raise ConfigError(f"{node.node_id} could not start: {node.epitaph}")
        for member in self._membership.members:
            if member.state is MemberState.REFUSED and member.node_id in node_ids:
                raise ConfigError(f"{member.node_id} does not fit: {member.reason}")
        live = {node.ref.node_id for node in self._membership.all_live()}
        return live.issuperset(node_ids)

    async def _joined(self) -> None:
        """Prefill nodes alone serve nothing; if there are to be some, the proof had better go through them."""
        while not self._membership.all_live():
            await self._membership.changed()
        if not self.model.known:
            await self._learn_model()
        while not self._membership.live(Role.DECODE):
            await self._membership.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_FOR_PREFILL_S):
                while self._membership.expects(Role.PREFILL) and not self._membership.live(Role.PREFILL):
                    await self._membership.changed()

    async def _learn_model(self) -> None:
        name = self._membership.all_live()[0].hello.flags.get("model")
        if not isinstance(name, str):
            raise ConfigError("the node does not say which model it serves: give --model")
        try:
            model = await asyncio.to_thread(load_model, name, self._config)
        except ConfigError as e:
            raise ConfigError(f"the nodes serve {name!r}, which this router cannot read: {e}") from e
        self.model.fill(model)

    def _close_model(self) -> None:
        if self.model.known:
            self.model.get().tokenizer.close()


def load_model(name: str, config: RouterConfig) -> ServedModel:
    """Find and read a model's config, tokenizer and chat template. Raises ConfigError."""
    http = config.http
    path = resolve_model(name, with_weights=False)
    return ServedModel.load(name, path, served_name=http.served_model_name, chat_template=http.chat_template)


def api_keys(config: RouterConfig) -> ApiKeys:
    """The keys that clients and administrators may use. Raises ConfigError."""
    http = config.http
    return ApiKeys(
        clients=KeySource(flag="--api-key", given=http.api_keys, file=http.api_key_file),
        admins=KeySource(flag="--admin-api-key", given=http.admin_api_keys, file=http.admin_api_key_file),
    )
