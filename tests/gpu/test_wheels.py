"""What the two commands import is on the machine or among the wheels, and nothing else is among them."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.gpu.checks import CHECKS
from tests.gpu.steps import COMMANDS
from tests.gpu.wheels import MACHINE_HAS, ROOT, needs, wanted_of_project

OPTIONAL = {
    "compressed_tensors",
    "cryptography",
    "kubernetes",
    "openai",
    "playwright",
    "schemathesis",
    "matplotlib",
    "ruff",
    "mypy",
}
"""Development dependencies that no step takes, and extras that only `--kv-tls` and `--discovery k8s` import."""
SERVICE = ("router", "prefill_node", "decode_node", "shared")


def path_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    at = ROOT.joinpath(*module.split("."))
    return next((path for path in (at.with_suffix(".py"), at / "__init__.py") if path.is_file()), None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported_by(path: Path) -> Iterator[str]:
    """Every module that a file names, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of_the_commands() -> set[str]:
    """Packages outside of this repository that steps, their tests and the processes they start may import."""
    left = ["tests.gpu.__main__", "tests.gpu.step", "tests.conftest"]
    left += [module_of(path) for package in SERVICE for path in (ROOT / package).rglob("*.py")]
    left += [f"tests.gpu.{step.module}" for steps in COMMANDS.values() for step in steps.values()]
    words = [
        word.partition("::")[0] for check in CHECKS.values() for word in check if word.startswith("tests/")
    ]
    for path in map(ROOT.joinpath, words):
        files = [path] if path.is_file() else [*path.glob("*.py")]
        left += map(module_of, files)
    seen, outside = set[str](), set[str]()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if path := path_of(module):
            left += imported_by(path)
            left += [module.rpartition(".")[0]] * ("." in module)
        elif not ROOT.joinpath(module.partition(".")[0]).is_dir():
            outside.add(module.partition(".")[0])
    return outside - sys.stdlib_module_names


@cache
def needed() -> dict[str, set[str]]:
    """Packages of `make gpu-wheels`, and those that the machine has with what they need, by this venv's metadata."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    wheels = closure([canonicalize_name(one.name) for one in wanted_of_project(pyproject)], set(MACHINE_HAS))
    return {"wheels": wheels, "machine": closure(list(MACHINE_HAS), set())}


def closure(left: list[str], without: set[str]) -> set[str]:
    found = set[str]()
    while left:
        name = left.pop()
        if name in found or name in without:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform than this one
            continue
        left += [canonicalize_name(one.name) for one in needs(lines, "3.12")]
    return found


def test_nothing_that_the_commands_import_is_missing() -> None:
    packages = importlib.metadata.packages_distributions()
    have = needed()["wheels"] | needed()["machine"]
    imported = imports_of_the_commands()
    assert {
        "torch",
        "triton",
        "msgspec",
        "zmq",
        "regex",
        "pytest",
        "hypothesis",
        "httpx",
        "psutil",
    } <= imported
    found = {name: {canonicalize_name(one) for one in packages.get(name, [])} for name in imported - OPTIONAL}
    assert [name for name, of_name in found.items() if not of_name & have] == []


def test_nothing_travels_that_no_step_needs() -> None:
    """pytest's plugins are named in no file: `timeout` of pyproject.toml and `-n` need two."""
    assert {"pytest-timeout", "pytest-xdist"} <= needed()["wheels"]
    assert not needed()["wheels"] & (OPTIONAL | set(MACHINE_HAS))
