"""Nodes that are forked from a process that has imported everything, which saves seconds at each start.

On a GPU they are spawned: what is imported may look for GPUs, and CUDA does not work in a fork of a process that did.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.flags import FlagParser
from shared.timeline import Role
from tests.device import device

IMPORTED = (
    "shared.engine.node_process",
    "decode_node.scheduler",
    "prefill_node.scheduler",
    "shared.grammar.xgrammar_backend",
    "shared.kvtransfer.transports.gloo",
    "shared.kvtransfer.transports.shm",
)
"""What nodes import. The process that forks passes silently over a module that is not there."""
assert all(find_spec(name) for name in IMPORTED)


def context() -> Any:
    """How processes are started: forked from a server that has imported what nodes import, and has no threads."""
    if device().type != "cpu":
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__, *IMPORTED])
    return forking


class Forked:
    """A process that ends with the exit code that `run` returns (a `tests.processes.Child`).

    It is in a session of its own, and appends its output to `log_path`.
    """

    def __init__(self, log_path: Path, run: Callable[..., int], *args: object) -> None:
        self._process = context().Process(target=_run_logged, args=(log_path, run, args))
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


def run_module(module: str, argv: Sequence[str]) -> int:
    """As `python -m module` with these arguments."""
    sys.argv = [module, *argv]
    code: int = import_module(f"{module}.__main__").main(argv)
    return code


def node_parser(default_port: int = 0) -> FlagParser:
    """That of `prefill-node` and `decode-node`."""
    parser = make_parser("prefill-node", "A node.")
    add_net_flags(parser, default_port)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return parser


def run_altered_node(role: Role, flags: Sequence[str], builder_of: Callable[..., object]) -> int:
    """Run a node whose scheduler `builder_of` builds, as in `run_node`. Returns the exit code."""
    from shared.engine.node_process import run_node  # loads torch

    return run_node(role, node_config(node_parser(), flags), builder_of)  # type: ignore[arg-type]


def _run_logged(log_path: Path, run: Callable[..., int], args: Sequence[object]) -> None:
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    warnings.simplefilter("error", ResourceWarning)
    sys.exit(run(*args))
