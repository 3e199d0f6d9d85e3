"""A Work is made where a request enters; behind that it is only changed, by `msgspec.structs.replace`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE_IN = {
    "planner/measure/node_loop.py",
    "planner/simulator/fleet.py",
    "router/api/generate_api.py",
    "router/api/openai_requests.py",
    "router/api/service_api.py",
    "router/server.py",
    "shared/engine/cuda/batches.py",
}


def makes_work(module: ast.Module) -> bool:
    """Whether it calls `Work` of the messages."""
    from_messages = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "shared.protocol.messages"
        and any(alias.name == "Work" for alias in node.names)
        for node in ast.walk(module)
    )
    calls = (node.func for node in ast.walk(module) if isinstance(node, ast.Call))
    return from_messages and any(isinstance(call, ast.Name) and call.id == "Work" for call in calls)


def test_a_work_is_made_where_a_request_enters() -> None:
    """A copy field by field would drop without a word what a later release adds."""
    roots = ("router", "prefill_node", "decode_node", "shared", "planner")
    paths = [path for root in roots for path in (ROOT / root).rglob("*.py")]
    made_in = {str(path.relative_to(ROOT)) for path in paths if makes_work(ast.parse(path.read_text()))}
    assert made_in == MADE_IN
