"""`router`: the process that owns all others. It loads no model and serves no request.

supervisor              the HTTP port's reservation, the port where nodes announce themselves, discoveries
├─ router 0 .. N - 1    HTTP, tokenizer, connections to all nodes; all listen on one port (SO_REUSEPORT)
└─ nodes of this machine (--local)

async with Supervisor(config, flags) as supervisor:
    await supervisor.start()      everything runs; ConfigError or ChildFailed when that cannot be
    await supervisor.broken()     for ever: children that die are started again
                                  routers are stopped, then nodes
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import sys
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from typing import Any

import zmq.asyncio

from router.api.prefix_hashes import KEY_NBYTES
from router.config import RouterConfig
from router.http.http_socket import reserve_http
from router.nodes.discovery import DnsDiscovery, Listing
from router.nodes.join_socket import JoinSocket
from router.processes import feed
from router.processes.child_process import ChildFailed, ChildProcess, stop_all
from router.processes.feed import Listed, LogKey, NodeExited, ToRouter
from shared.cpu_cores import split_cores
from shared.errors import ConfigError
from shared.log import event
from shared.model.files import resolve_model
from shared.protocol.messages import Announcement, Join, LoadFailed, Loading, Role
from shared.protocol.security import FleetKey

HEARTBEAT_TIMEOUT_S = 30.0
_LOAD_FAILED_S = 1.0
_MODULES = {Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}


class Supervisor(contextlib.AbstractAsyncContextManager["Supervisor"]):
    """Starts routers and local nodes, and starts again those that die. `flags` are those that `config` was read from.

    `router_stdout` is where routers print; None: where this process does.
    """

    def __init__(
        self,
        config: RouterConfig,
        flags: Sequence[str],
        *,
        router_stdout: int | None = None,
    ) -> None:
        self._config = config
        self._flags = flags
        self._routers = [self._router(index, router_stdout) for index in range(config.http.router_workers)]
        self._nodes: dict[str, ChildProcess] = {}
        self._exited: dict[str, NodeExited] = {}
        """Of the local nodes that have not announced themselves since, for a router that is started again."""
        self._failures: dict[str, str] = {}
        """Why nodes could not load, as they announced it."""
        self._steps: dict[str, str] | None = {}
        """The step of loading that was printed last of each node. None: the nodes of this machine have loaded."""
        self._sources: list[asyncio.Task[None]] = []
        """What listens on the control port, and the discoveries."""
        self._listings: dict[int, Listing] = {}
        """What each discovery has listed last."""
        self._log_key = LogKey(secrets.token_bytes(KEY_NBYTES))
        self._exits = contextlib.AsyncExitStack()
        self.http_port = 0
        self.control_port = 0

    async def __aexit__(self, *_: object) -> None:
        """Stop the routers, then the nodes."""
        await self._exits.aclose()

    async def start(self) -> None:
        """Bind the ports and start everything. Raises ConfigError; ChildFailed if a router has printed the reason."""
        config = self._config
        config.check()
        if config.model is not None:
            resolve_model(config.model, with_weights=False)  # once, before every router does
        reserved = reserve_http(config.http.host, config.http.port)
        self._exits.callback(reserved.close)
        self.http_port = reserved.getsockname()[1]
        discoveries = [DnsDiscovery.of(source) for source in config.fleet.discovery]
        join_socket = self._open_join_socket()
        grace_s = config.dispatch.stop_timeout_s
        self._nodes = dict(self._local_nodes())
        self._exits.push_async_callback(stop_all, [*self._nodes.values()], grace_s)
        drained_s = config.dispatch.drain_timeout_s + grace_s
        self._exits.push_async_callback(stop_all, self._routers, drained_s)
        event("supervisor_listening", http_port=self.http_port, control_port=self.control_port)
        first, *others = self._routers
        first.start()
        await self._unless_failed(first.loaded.wait())  # a wrong flag must not start nodes first
        self._listen(join_socket.listen(self._on_announcement), "join")
        for index, discovery in enumerate(discoveries):
            self._listen(discovery.run(functools.partial(self._on_listing, index)), "discovery")
        for child in (*others, *self._nodes.values()):
            child.start()
        await self._unless_failed(asyncio.gather(*(node.ready.wait() for node in self._nodes.values())))
        self._steps = None
        await self._unless_failed(asyncio.gather(*(router.ready.wait() for router in self._routers)))

    async def broken(self) -> None:
        """Wait until a part that should run for ever ends, and raise its error."""
        await self._unless_failed(asyncio.Event().wait())

    def kill(self) -> None:
        """SIGKILL for every child."""
        for child in self._children:
            child.kill("second signal to stop")

    # --------------------------------------------------------------------------------------- children
    def _router(self, index: int, stdout: int | None) -> ChildProcess:
        def argv() -> list[str]:
            life = "restarted" if router.ready.is_set() else "first"
            begin = [str(index), str(self.http_port), life]
            return ["-m", "router.processes.router_process", *begin, *self._flags]

        def greet() -> None:
            known: list[ToRouter] = [self._log_key, *self._exited.values(), self._listed]
            router.send(b"".join(map(feed.encode, known)))

        router = ChildProcess(
            "router",
            str(index),
            argv,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            stdout=stdout,
            on_start=greet,
        )
        return router

    @property
    def _children(self) -> list[ChildProcess]:
        return [*self._routers, *self._nodes.values()]

    @property
    def _control_address(self) -> str:
        """Where nodes of this machine announce themselves."""
        host = self._config.fleet.control_host
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
        return f"[{host}]:{self.control_port}" if ":" in host else f"{host}:{self.control_port}"

    def _local_nodes(self) -> Iterator[tuple[str, ChildProcess]]:
        """The local nodes. They listen on free ports, join by the control port, and get equal shares of the cores."""
        fleet = self._config.fleet
        names = fleet.local.node_ids()
        if not names:
            return
        for (role, node_id), cores in zip(names, split_cores(fleet.cpu_cores, len(names)), strict=True):
            own = ["--router", self._control_address, "--port", "0", "--node-id", node_id]
            own += ["--cpu-cores", str(cores)]
            argv = ("-m", _MODULES[role], *own, "--exit-with-parent", *fleet.node_argv)
            yield node_id, self._local_node(role, node_id, argv)

    def _local_node(self, role: Role, node_id: str, argv: Sequence[str]) -> ChildProcess:
        def on_exit(code: int | None, how: str, pause_s: float) -> None:
            reason = f"{self._failures.pop(node_id, how)}; started again in {pause_s:g} s"
            self._exited[node_id] = NodeExited(node_id, role, reason, crashed=code != 0)
            self._send_to_routers(self._exited[node_id])

        return ChildProcess("node", node_id, lambda: argv, on_exit=on_exit)

    async def _unless_failed(self, work: Awaitable[object]) -> None:
        """Wait for `work`. Raises the error of a child or of the control port that fails meanwhile."""
        keepers = {child.keeper for child in self._children if child.keeper}
        waited = [asyncio.ensure_future(work), *keepers, *self._sources]
        try:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ChildFailed as failed:
            if failed.kind != "node" and (failed.code or 0) > 0:
                raise  # it has printed the reason
            await asyncio.sleep(_LOAD_FAILED_S)  # LoadFailed may still arrive
            reason = self._failures.get(failed.name)
            raise ConfigError(
                f"{failed.name} could not start: {reason}" if reason else str(failed)
            ) from failed
        finally:
            waited[0].cancel()
            await asyncio.gather(waited[0], return_exceptions=True)

    # ------------------------------------------------------------------------------ what nodes announce
    def _open_join_socket(self) -> JoinSocket:
        fleet = self._config.fleet
        fleet_key = FleetKey.load(fleet.fleet_key)
        context = zmq.asyncio.Context()
        self._exits.callback(context.destroy)
        if fleet_key is not None:
            self._log_key = LogKey(fleet_key.derive(b"baton-log"))
            self._exits.callback(fleet_key.authenticator(context).stop)
        join_socket = JoinSocket(context, fleet_key)
        self._exits.callback(join_socket.close)
        self.control_port = join_socket.bind(fleet.control_host, fleet.control_port or 0)
        return join_socket

    def _on_announcement(self, message: Announcement) -> None:
        match message:
            case Join(node):
                node_id, step = node.node_id, "ready"
                if node_id in self._nodes:
                    self._nodes[node_id].ready.set()
            case LoadFailed(node_id, _, reason):
                self._failures[node_id], step = reason, f"failed: {reason}"
            case Loading(node_id, _, step, _):
                pass
        if self._steps is not None and self._steps.get(node_id) != step:
            self._steps[node_id] = step
            print(f"{node_id}: {step}", file=sys.stderr, flush=True)
        self._exited.pop(node_id, None)
        self._send_to_routers(message)

    def _listen(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._sources.append(task)
        self._exits.callback(task.cancel)

    def _on_listing(self, index: int, listing: Listing) -> None:
        if listing != self._listings.get(index, frozenset()):
            self._listings[index] = listing
            event("nodes_discovered", source=self._config.fleet.discovery[index], num_nodes=len(listing))
            self._send_to_routers(self._listed)

    @property
    def _listed(self) -> Listed:
        return Listed(tuple(sorted(frozenset().union(*self._listings.values()))))

    def _send_to_routers(self, message: ToRouter) -> None:
        frame = feed.encode(message)
        for router in self._routers:
            router.send(frame)
