"""The nodes that a router starts on its own machine, as child processes.

A child must not outlive its parent: it stops when its standard input reaches its end, which the kernel brings
about however the router dies. It is in a session of its own, so that Ctrl-C in a terminal reaches the
router alone and the nodes are stopped in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.http.topology import LocalTopology
from shared.cpu_cores import CpuCores, split_cores
from shared.log import event, warn
from shared.protocol.messages import LoadFailed, NodeToLobby, Role

_STDERR = 2  # standard output is the router's own: the demo's last line is for machines
_LAST_WORDS_S = 0.1

_MODULES = {Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}


@dataclass(eq=False)
class LocalNode:
    """One child. `failure` is why it could not start, in its own words."""

    role: Role
    node_id: str
    process: asyncio.subprocess.Process
    failure: str = ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.returncode

    @property
    def epitaph(self) -> str:
        """Why it is gone."""
        if self.failure:
            return self.failure
        code = self.exit_code
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class LocalFleet:
    """Starts, watches and stops the children. `on_exit` is called for each that ends before `stop`."""

    def __init__(
        self,
        topology: LocalTopology,
        *,
        control_address: str,
        node_argv: Sequence[str],
        cpu_cores: CpuCores | None,
        on_exit: Callable[[LocalNode], None],
    ) -> None:
        self._topology = topology
        self._control_address = control_address
        self._node_argv = node_argv
        self._cpu_cores = cpu_cores
        self._on_exit = on_exit
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.nodes: list[LocalNode] = []

    async def start(self) -> None:
        """Start every child with its share of the cores; they join by the control port when they have loaded."""
        nodes = self._topology.node_ids()
        shares = split_cores(self._cpu_cores, len(nodes))
        for (role, node_id), cores in zip(nodes, shares, strict=True):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULES[role],
                "--router",
                self._control_address,
                "--port",
                "0",
                "--node-id",
                node_id,
                "--exit-with-parent",
                "--cpu-cores",
                str(cores),
                *self._node_argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=_STDERR,
                start_new_session=True,
            )
            node = LocalNode(role, node_id, process)
            event("node_started", node=node_id, pid=process.pid, cpu_cores=cores)
            self.nodes.append(node)
            self._watchers.append(asyncio.create_task(self._watch(node)))

    def on_lobby(self, message: NodeToLobby) -> None:
        """Keep a child's own words for why it cannot start (a `lobby.LobbyListener`)."""
        for node in self.nodes:
            if isinstance(message, LoadFailed) and node.node_id == message.node_id:
                node.failure = message.reason

    async def stop(self, grace_s: float) -> None:
        """SIGTERM for all, SIGKILL for those that are still there after `grace_s`."""
        self._stopping = True
        self._signal_all(signal.SIGTERM)
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=grace_s)
        self.kill()
        await asyncio.gather(*self._watchers)

    def kill(self) -> None:
        """SIGKILL for all that still run."""
        self._stopping = True
        for node in self._signal_all(signal.SIGKILL):
            warn("node_killed", node=node.node_id)

    def _signal_all(self, signum: signal.Signals) -> list[LocalNode]:
        running = [node for node in self.nodes if node.exit_code is None]
        for node in running:
            try:
                os.killpg(node.process.pid, signum)
            except ProcessLookupError:
                continue  # it has just ended
        return running

    async def _watch(self, node: LocalNode) -> None:
        await node.process.wait()
        await asyncio.sleep(0 if self._stopping else _LAST_WORDS_S)  # LoadFailed may still be on its way
        event("node_exited", node=node.node_id, code=node.exit_code)
        if not self._stopping:
            self._on_exit(node)
