"""Every log event about a request has the request's `fields`: its rid, and the parts of its key."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = {"event", "warn", "crash"}
ELSEWHERE = {"router/api/request_log.py", "router/nodes/shared_news.py"}
"""The line of a whole HTTP request, which names all its sequences, and an abort of whatever has some rid."""


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for package in ("router", "prefill_node", "decode_node", "shared"):
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            if not any(f"{name}(" in source for name in LOGS):
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                    name = (
                        node.func.attr
                        if isinstance(node.func, ast.Attribute)
                        else getattr(node.func, "id", "")
                    )
                    if name in LOGS and isinstance(node.args[0].value, str):
                        yield path.relative_to(ROOT).as_posix(), node


def names(node: ast.AST) -> set[str]:
    """Every name and attribute in an expression."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def test_an_event_about_a_request_has_its_fields() -> None:
    about, without = 0, []
    for path, call in log_calls():
        values = [keyword.value for keyword in call.keywords]
        expanded = [keyword for keyword in call.keywords if keyword.arg is None]
        has_fields = any("fields" in names(keyword.value) for keyword in expanded)
        about += has_fields
        is_about = any({"req", "rid"} & names(value) for value in values) or any(
            keyword.arg in ("rid", "key", "req") for keyword in call.keywords
        )
        if is_about and not has_fields and path not in ELSEWHERE:
            without.append(f"{path}:{call.lineno}")
    assert not without
    assert about >= 15, "the events are still found"
