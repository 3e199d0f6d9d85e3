"""Nodes on hosts of their own, as the README starts them: each has a network namespace with an address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.topology import DEFAULT_PORTS
from shared.timeline import Role
from tests.fault.matrix.namespaces import Namespaces, enter
from tests.forked import Forked, run_module
from tests.modelzoo import random_prompt, reference_greedy
from tests.processes import NODE_FLAGS, Call, Child, Process, Router

NUM_NEW = 24
KV_PORT = 7300


class Host(Process):
    """A node on a host of its own, with the commands of the README."""

    def __init__(self, folder: Path, network: Namespaces, role: str, name: str, *flags: str) -> None:
        address = network.address(name)
        self.address = f"{address}:{DEFAULT_PORTS[Role(role)]}"
        argv = ("--host", "0.0.0.0", "--advertise-host", address, *NODE_FLAGS, *flags)
        super().__init__(name, f"{role}_node", argv, folder)
        self._module = f"{role}_node"
        self._namespace = network.name_of(name)

    def _spawn(self) -> Child:
        return Forked(self.log_path, _run_there, self._namespace, self._module, self.argv[5:])


def _run_there(namespace: str, module: str, argv: Sequence[str]) -> int:
    enter(namespace)
    return run_module(module, argv)


def check(router: Router, model: Path, seed: int) -> Call:
    """One request through both fleets, with the tokens of the model."""
    prompt = random_prompt(300, seed=seed)
    call = router.generate(prompt, NUM_NEW, stream=True, return_timeline=True)
    assert call.tokens() == reference_greedy(model, prompt, NUM_NEW)
    assert call.last["meta_info"]["kv_pages_transferred"] > 0
    return call


def links(router: Router, name: str) -> list[dict[str, Any]]:
    """Those of a node, as /fleet shows them: none while the router has no connection to it."""
    _, fleet = router.get("/fleet")
    (found,) = [node for node in fleet["nodes"] if node["node_id"].startswith(name)]
    return list(found["load"]["links"]) if "load" in found else []
