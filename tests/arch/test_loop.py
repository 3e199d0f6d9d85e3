"""ARCHITECTURE.md shows the loop of a node as both roles have it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shown_loop() -> str:
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## The loop of a node")[1]
    return section.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_loop_is_the_one_that_is_shown(role: str) -> None:
    module = ast.parse((ROOT / f"{role}_node" / "scheduler.py").read_text())
    (step,) = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "step")
    _docstring, *loop, _returns_worked = step.body
    assert ast.dump(ast.Module(loop, [])) == ast.dump(ast.parse(shown_loop()))
