"""Where nodes come from: the control port where all announce themselves, and those that are started on this machine.

async with NodeHost(config, console, on_lobby=..., on_gone=...) as host:   the control port is bound
    await host.start_nodes()                                              children are loading
    with host.progress():                                                 ... and it is shown how far they are
        ...
    await host.listen()                                                   for ever
                                                                          children are stopped
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

import zmq.asyncio
from rich.console import Console

from router.http.config import RouterConfig
from router.nodes.load_progress import LoadProgress
from router.nodes.lobby import Lobby, LobbyListener
from router.nodes.local import LocalFleet, LocalNode
from shared.protocol.messages import NodeToLobby
from shared.protocol.security import FleetKey

GoneListener = Callable[[str, str], None]
"""(node id, why): a node that was started here has ended, and will not come back."""


class NodeHost:
    """An async context manager. `on_lobby` is told what nodes announce, `on_gone` which children have ended."""

    def __init__(
        self, config: RouterConfig, console: Console, *, on_lobby: LobbyListener, on_gone: GoneListener
    ) -> None:
        self._config = config
        self._console = console
        self._tell_lobby = on_lobby
        self._tell_gone = on_gone
        self._exits = contextlib.AsyncExitStack()
        self._progress: LoadProgress | None = None
        self._local: LocalFleet | None = None
        self.control_port = 0

    @property
    def node_ids(self) -> list[str]:
        """The nodes to be started here."""
        return [node_id for _, node_id in self._config.fleet.local.node_ids()]

    async def __aenter__(self) -> NodeHost:
        """Bind the control port. Raises ConfigError."""
        fleet = self._config.fleet
        fleet_key = FleetKey.load(fleet.fleet_key) if fleet.fleet_key else None
        async with contextlib.AsyncExitStack() as exits:
            context = zmq.asyncio.Context()
            exits.callback(context.destroy)
            if fleet_key is not None:
                exits.callback(fleet_key.authenticator(context).stop)
            self._lobby = Lobby(context, fleet_key)
            exits.callback(self._lobby.close)
            self.control_port = self._lobby.bind(fleet.control_host, fleet.control_port)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the children, then the port."""
        await self._exits.aclose()

    async def start_nodes(self) -> None:
        """Start the children, if there are to be any; they join by the control port when they have loaded."""
        fleet = self._config.fleet
        if not self.node_ids:
            return
        host = "127.0.0.1" if fleet.control_host in ("0.0.0.0", "::", "localhost") else fleet.control_host
        host = f"[{host}]" if ":" in host else host
        self._local = LocalFleet(
            fleet.local,
            control_address=f"{host}:{self.control_port}",
            node_argv=fleet.node_argv,
            cpu_cores=fleet.cpu_cores,
            on_exit=self._on_exit,
        )
        self._exits.push_async_callback(self._local.stop, self._config.dispatch.stop_timeout_s)
        await self._local.start()

    async def listen(self) -> None:
        """Pass on what nodes announce, for ever."""
        await self._lobby.listen(self._on_lobby)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show how far the children are with loading."""
        if self._local is None:
            yield
            return
        with LoadProgress(self._console, self.node_ids) as self._progress:
            yield
        self._progress = None

    def kill_nodes(self) -> None:
        """Do not wait for the children any longer."""
        if self._local is not None:
            self._local.kill()

    def _on_lobby(self, message: NodeToLobby) -> None:
        if self._local is not None:
            self._local.on_lobby(message)
        if self._progress is not None:
            self._progress.on_lobby(message)
        self._tell_lobby(message)

    def _on_exit(self, node: LocalNode) -> None:
        self._tell_gone(node.node_id, node.epitaph)
