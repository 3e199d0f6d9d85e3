"""One router: dials nodes, places requests, answers HTTP. `processes.router_process` runs one.

async with Router(config, model) as router:   nodes that were named are dialled
    await router.serve(shared, own)           HTTP answers
    await router.ready(node_ids)              the fleet serves; ConfigError when it cannot
    ...
    await router.drain()                      running requests finish, new ones are refused
    await router.stop_serving()               those that still run fail, and nodes are told to end them
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from router.api.live_state import LiveState
from router.api.prefix_hashes import PrefixHasher
from router.app import Service, create_app
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import Metrics
from router.http.api_keys import api_keys, warn_if_open
from router.http.http_server import HttpServer
from router.nodes.fleet_answers import RequestsAborted
from router.nodes.fleet_changes import FleetChanges
from router.nodes.live_node import Timing
from router.nodes.member import MemberState
from router.nodes.membership import Membership
from router.nodes.shared_news import SharedNews
from router.nodes.status import FleetStatus
from router.request.admission import Admissions
from router.request.generation import Generator
from router.request.prompt import Prompt
from router.text.served_model import ModelSlot, ServedModel
from shared.errors import ConfigError
from shared.log import event
from shared.model.files import resolve_model
from shared.protocol.dial_socket import MAX_SOCKETS
from shared.protocol.messages import AbortedReqs, Role, Work
from shared.protocol.resolver import Resolver
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.security import FleetKey

if TYPE_CHECKING:
    from router.api.traces import Traces

ABORTED = "aborted by /abort_request"
STOPPING = "the router is shutting down"
_WAIT_FOR_PREFILL_S = 5.0
_DRAIN_POLL_S = 0.05
_PROOF_IDS = [0] * 8


class Router:
    """All parts of one router, as an async context manager.

    `config.fleet.join` and what `membership` is told name its nodes. `index` counts the routers that share a port
    (--router-workers).
    """

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel | None,
        index: int = 0,
    ) -> None:
        self._config = config
        self._index = index
        self._exits = contextlib.AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []
        self._server: HttpServer | None = None
        self.keys = api_keys(config.http)
        self.model = ModelSlot(model)
        self.incarnation = secrets.token_hex(6)
        self.log_hasher = PrefixHasher()
        self.http_port = 0
        self.prometheus_port = 0

    async def __aenter__(self) -> Router:
        """Build the parts and begin to dial."""
        async with contextlib.AsyncExitStack() as exits:
            await self._build(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection to a node."""
        await self._exits.aclose()

    @property
    def url(self) -> str:
        """The router's URL for clients on this machine."""
        return self._config.http.url(self.http_port)

    async def serve(self, shared: socket.socket, own: socket.socket | None = None) -> None:
        """Answer HTTP on sockets that listen, from now on. Raises the error of a server that cannot start.

        Other routers may listen on the port of `shared`, and none on that of `own`.
        """
        http = self._config.http
        sockets = [shared] if own is None else [shared, own]
        self.http_port, self.prometheus_port = shared.getsockname()[1], sockets[-1].getsockname()[1]
        app = create_app(
            Service(
                model=self.model,
                membership=self.membership,
                changes=self._changes,
                admissions=self._admissions,
                generator=self._generator,
                abort=self._abort_everywhere,
                metrics=self._metrics,
                status=self._status,
                live=self._live,
                http=http,
                keys=self.keys,
                traces=self._traces,
                log_hasher=self.log_hasher,
                flags=self._flags(),
            )
        )
        self._server = HttpServer(app, self._config.connections, log_requests=http.log_requests)
        self._watch_http(self._server)
        await self._server.start(sockets)
        self._spawn(self._server.serve(), "http")
        self._spawn(self._live.run(), "live state")
        event(
            "router_listening",
            http_port=self.http_port,
            prometheus_port=self.prometheus_port,
            incarnation=self.incarnation,
        )
        if self._index == 0:
            warn_if_open(self.keys, http.host)

    async def drain(self) -> None:
        """Refuse new requests, say so in /health, and wait until those that run have finished, for a while."""
        self._status.stopping = True
        self._dispatcher.refuse(STOPPING)
        until = time.monotonic() + self._config.dispatch.drain_timeout_s
        while self._dispatcher.num_running and time.monotonic() < until:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop_serving(self) -> None:
        """Refuse new requests, fail those that run, and tell nodes to end them. Comes before `__aexit__`."""
        self._status.stopping = True
        self._dispatcher.close(STOPPING)
        self._live.close()
        if self._server is not None:
            self._server.stop()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.membership.close()

    async def ready(self, node_ids: Sequence[str] = ()) -> None:
        """Wait until these nodes serve, or, if none is named, until the fleet can serve. Raises ConfigError."""
        if not node_ids:
            await self._joined()
        while not self._all_serve(node_ids):
            await self.membership.changed()

    async def prove(self, text: str, max_new_tokens: int) -> str:
        """Complete `text`, or token ids without a tokenizer, greedily, through both fleets. Raises RequestError."""
        model = self.model.get()
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        input_ids = (await model.tokenizer.encode([text]))[0] if model.tokenizer.has_text else _PROOF_IDS
        work = Work(tuple(input_ids), params)
        prompt = Prompt(rid=f"proof-{secrets.token_hex(4)}", work=work, split=True)
        async with self._generator.probe(prompt, model.tokenizer) as group:
            return "".join([added async for _, added in group.steps()])

    async def broken(self) -> None:
        """Wait until a part that should run for ever ends, and raise its error."""
        done, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError(f"{', '.join(task.get_name() for task in done)} ended by itself")

    # ------------------------------------------------------------------------------------------ inside
    async def _build(self, exits: contextlib.AsyncExitStack) -> None:
        config, options = self._config, self._config.dispatch
        fleet_key = FleetKey.load(config.fleet.fleet_key)
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        exits.callback(context.destroy)
        self.membership = Membership(
            context,
            incarnation=self.incarnation,
            fleet_key=fleet_key,
            timing=Timing(node_timeout_s=options.node_timeout_s),
            resolver=Resolver(),
        )
        exits.push_async_callback(self.membership.close)
        self._metrics = Metrics(self.model.name)
        self._metrics.watch(self.membership.all_live)
        self._dispatcher = Dispatcher(
            self.membership,
            incarnation=self.incarnation,
            options=options,
            metrics=self._metrics,
            vocab_size=self.model.vocab_size,
            later=asyncio.get_running_loop().call_later,
        )
        self._traces = open_traces(config.http.otlp_traces_endpoint)
        if self._traces is not None:
            exits.push_async_callback(asyncio.to_thread, self._traces.close)
        self._admissions = Admissions(
            self._dispatcher.queue, options.max_queued_requests, self._metrics.rejected
        )
        self._metrics.watch_own(
            "baton:num_queued_reqs",
            "Sequences that wait for their first token, in all queues.",
            lambda: self._admissions.num_queued,
        )
        self._generator = Generator(self._dispatcher, self._admissions, patience_s=options.failover_timeout_s)
        self._news = SharedNews(self.membership.all_live, self.incarnation)
        self._changes = FleetChanges(self.membership, self._dispatcher, self._news, self._abort)
        exits.push_async_callback(self._changes.close)
        self.membership.report_to(self._dispatcher, self._changes)
        self._status = FleetStatus(self.membership, self.model)
        self._live = LiveState(
            self.membership,
            self._dispatcher,
            self._metrics,
            self._status,
            self.model,
            str(self._index) if config.http.router_workers > 1 else None,
        )
        exits.callback(self._close_model)
        for role, address in config.fleet.join:
            self.membership.dial(address, role, pinned=True)

    def _watch_http(self, server: HttpServer) -> None:
        watch = self._metrics.watch_own
        watch("baton:http_connections", "Connections of clients.", lambda: len(server.connections))
        watch(
            "baton:http_unsent_bytes",
            "Written to clients that are slow to take it.",
            lambda: server.connections.num_unsent_bytes,
        )

    def _flags(self) -> dict[str, object]:
        return self._config.shown() | {
            "router_index": self._index,
            "router_incarnation": self.incarnation,
            "prometheus_port": self.prometheus_port,
        }

    def _abort(self, rid: str | None) -> int:
        return self._generator.abort(rid, ABORTED)

    def _abort_everywhere(self, rid: str | None) -> RequestsAborted:
        self._news.send(AbortedReqs(rid))
        return RequestsAborted(aborted=self._abort(rid))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._background.append(asyncio.create_task(work, name=name))

    def _all_serve(self, node_ids: Sequence[str]) -> bool:
        for member in self.membership.members:
            if member.state is MemberState.REFUSED and member.node_id in node_ids:
                raise ConfigError(f"{member.node_id} does not fit: {member.reason}")
        live = {node.ref.node_id for node in self.membership.all_live()}
        return live.issuperset(node_ids)

    async def _joined(self) -> None:
        """Wait for a decode node, and for a while for prefill nodes, so that the first prompt goes through them."""
        while not self.membership.all_live():
            await self.membership.changed()
        if not self.model.known:
            await self._learn_model()
        while not self.membership.live(Role.DECODE):
            await self.membership.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_FOR_PREFILL_S):
                while self.membership.expects(Role.PREFILL) and not self.membership.live(Role.PREFILL):
                    await self.membership.changed()

    async def _learn_model(self) -> None:
        name = self.membership.all_live()[0].hello.flags.get("model")
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


def open_traces(endpoint: str | None) -> Traces | None:
    """Where traces go, if the flag names a collector. Raises ConfigError."""
    if endpoint is None:
        return None
    try:
        from router.api.traces import Traces
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the package {error.name}: pip install baton-serve[otel]"
        ) from None
    return Traces(endpoint)


def load_model(name: str, config: RouterConfig) -> ServedModel:
    """Find and read a model's config, tokenizer and chat template. Raises ConfigError."""
    return ServedModel.load(name, resolve_model(name, with_weights=False), config.http)
