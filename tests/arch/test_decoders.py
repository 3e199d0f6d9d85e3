"""Where several threads decode, the types are known before any of them begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THREADED = ("shared/kvtransfer", "shared/grammar", "shared/protocol", "shared/engine")


def first_decodes(path: Path) -> Iterator[str]:
    """The calls of msgspec's functions that build a decoder when they are called: `decode(.., type=..)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "decode"
            and any(keyword.arg == "type" for keyword in node.keywords)
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("room", THREADED)
def test_no_thread_is_the_first_to_decode_a_type(room: str) -> None:
    """Two that are, at the same moment, crash the process. A `Decoder` of the module is made when it is imported."""
    assert [place for path in (ROOT / room).rglob("*.py") for place in first_decodes(path)] == []
