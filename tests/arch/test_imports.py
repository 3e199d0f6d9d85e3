"""Who may import whom: the contracts of pyproject.toml, and what must not be loaded, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def first_to_load(modules: Sequence[str]) -> str:
    """Which of `modules`, imported in this order in a process of its own, is the first to load a part of torch."""
    done = run_python(f"""
import sys
from importlib import import_module
for name in {modules!r}:
    import_module(name)
    if {{"torch", "triton", "transformers"}} & set(sys.modules):
        print(name)
        break
""")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_contracts_hold() -> None:
    """As `lint-imports` on the command line, without its cache."""
    done = run_python(
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_under_the_contracts_and_in_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    roots = set(project["tool"]["importlinter"]["root_packages"])
    assert {package.split(".")[0] for package in listed} == roots
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for root in roots
        for path in (ROOT / root).rglob("__init__.py")
    }
    assert on_disk == listed
    layers = project["tool"]["importlinter"]["contracts"][2]["layers"]
    layered = {name.strip() for layer in layers for name in layer.split("|")}
    assert layered == {
        f"shared.{path.stem}"
        for path in (ROOT / "shared").iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
    }


def router_modules() -> list[str]:
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "router").rglob("*.py"))]
    parts = [path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts for path in files]
    return [".".join(names) for names in parts if names[-1] != "__main__"]


def test_the_router_never_loads_torch() -> None:
    assert router_modules()
    assert first_to_load(router_modules()) == ""


def test_without_torch() -> None:
    """And a loaded torch would be seen."""
    without = (
        "shared.protocol.channel",
        "shared.protocol.join_announcer",
        "shared.protocol.messages",
        "shared.protocol.router_port",
        "shared.cli",
        "shared.log",
        "shared.timeline",
        "shared.kvcache.allocator",
        "shared.kvcache.radix_cache",
        "shared.model.files",
    )
    assert first_to_load([*without, "shared.kvcache.pools"]) == "shared.kvcache.pools"


def test_the_scheduler_runs_where_there_is_no_triton() -> None:
    modules = (
        "shared.scheduling.batcher, shared.scheduling.req, shared.scheduling.commit, "
        "shared.kvcache.ledger, shared.kvcache.audit, shared.engine.build, prefill_node.scheduler, "
        "decode_node.scheduler"
    )
    without = "import sys; sys.modules['triton'] = None; "
    assert run_python(f"{without}import triton").returncode != 0
    done = run_python(f"{without}import {modules}; print('transformers' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


SLOW_TO_IMPORT = ("torch", "numpy", "safetensors", "transformers", "xgrammar", "tokenizers", "pydantic", "fastapi",
                  "uvicorn", "uvloop", "zmq", "asyncio", "rich", "prometheus_client", "huggingface_hub")  # fmt: skip


@pytest.mark.parametrize("command", ["router", "prefill_node", "decode_node"])
def test_help_and_wrong_flags_wait_for_nothing(command: str) -> None:
    """What makes a command slow to start is imported once it is known that it is to run."""
    code = f"""
import atexit, sys
atexit.register(lambda: print("loaded:", *sorted({set(SLOW_TO_IMPORT)!r} & set(sys.modules))))
from {command}.__main__ import main
main([%r, "0"])
"""
    asked = run_python(code % "--help")
    assert asked.returncode == 0 and "--page-size" in asked.stdout, asked.stderr
    assert asked.stdout.endswith("loaded:\n"), asked.stdout.splitlines()[-1]
    refused = run_python(code % "--page-size")
    assert refused.returncode == 2 and "--page-size" in refused.stderr, refused.stderr
    assert refused.stdout == "loaded:\n"
