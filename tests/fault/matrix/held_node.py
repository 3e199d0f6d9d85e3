"""A real node that a test can hold in a stage.

Its process is forked from one that has imported everything, which saves seconds at each start.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.engine.node_process import BuildRole, NodeParts, Scheduler, builder_of, run_node
from shared.protocol.channel import Handlers
from shared.timeline import Role
from tests.fault.matrix.holding import HeldDecode, HeldPrefill, HeldScheduler, Orders
from tests.fault.matrix.namespaces import enter
from tests.fault.matrix.plants import install


class Forked:
    """A process that runs a held node (a `tests.processes.Child`)."""

    def __init__(
        self, role: Role, order_path: Path, flags: Sequence[str], log_path: Path, namespace: str = ""
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "decode_node.role", "prefill_node.role", "xgrammar"])
        self._process = context.Process(
            target=_run_forked, args=(role, order_path, flags, log_path, namespace)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode


def _run_forked(role: Role, order_path: Path, flags: Sequence[str], log_path: Path, namespace: str) -> None:
    os.setsid()
    if namespace:
        enter(namespace)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    faulthandler.enable()
    warnings.simplefilter("error", ResourceWarning)
    sys.exit(run_held(role, order_path, flags))


def run_held(role: Role, order_path: Path, flags: Sequence[str]) -> int:
    """Run a node of the role, which obeys the orders in a file. Returns its exit code."""
    orders = Orders(order_path)

    def held_builder_of(role: Role) -> BuildRole:
        def build_held(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
            install(role, parts, lambda: orders.current.plants)
            scheduler, handlers = builder_of(role)(parts)
            if isinstance(scheduler, PrefillScheduler):
                holds = HeldPrefill(parts, scheduler, orders).holds
            else:
                assert isinstance(scheduler, DecodeScheduler)
                holds = HeldDecode(parts, scheduler, orders).holds
            return HeldScheduler(scheduler, orders, holds), handlers

        return build_held

    parser = make_parser("held-node", "A node that a test can hold in a stage.")
    add_net_flags(parser, 0)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return run_node(role, node_config(parser.parse_args(flags)), held_builder_of)
