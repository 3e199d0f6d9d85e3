"""What the nodes of a local router have needed of memory, beside what was to be expected of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.model.config import load_model_config
from tests.processes import Router

MIB = 1 << 20
BEYOND_MIB = 400
"""A node's peak is at most its weights, its KV pool, and so much: torch's own 220, buffers, a grammar's library."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Of one node, in MiB: its highest resident set so far, and what of that model and KV pool account for."""

    node: str
    peak: float
    weights: float
    kv: float

    @property
    def beyond(self) -> float:
        """What is neither."""
        return self.peak - self.weights - self.kv


def footprints(router: Router, model: Path) -> list[Footprint]:
    """One for each node that the router has started. Weights take what the file does, and KV is in bfloat16."""
    config = load_model_config(model)
    token_nbytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    _, info = router.get("/get_server_info")
    tokens = {node["node_id"]: node["limits"]["max_total_num_tokens"] for node in info["nodes"]}
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return [
        Footprint(
            node=node,
            peak=_peak_kib(process.pid) / 1024,
            weights=weights / MIB,
            kv=tokens[node] * token_nbytes / MIB,
        )
        for node, process in sorted(nodes_of(router).items())
    ]


def nodes_of(router: Router) -> dict[str, psutil.Process]:
    """The processes of its nodes, by name."""
    lines = {process: process.cmdline() for process in psutil.Process(router.pid).children()}
    return {
        line[line.index("--node-id") + 1]: process for process, line in lines.items() if "--node-id" in line
    }


def _peak_kib(pid: int) -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), flags=re.M)
    assert found is not None
    return int(found[1])
