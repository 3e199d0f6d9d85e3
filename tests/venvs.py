"""Venvs of other people's tools, made once and again when what they need has changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TORCH_VERSION = os.environ.get("TORCH_VERSION", "2.13.0")
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
INSTALL_TIMEOUT_S = 1800.0
LOG_TAIL_LINES = 5


class InstallError(Exception):
    """A venv could not be made; the message holds pip's last words."""


@dataclass(frozen=True, kw_only=True)
class Venv:
    """What is installed into a venv called `name`: first of all a CPU build of torch, with `torch`, so that no
    dependency takes one with CUDA; then `requirements`; last, and each alone, `without_dependencies`.

    `build_environment` is for packages that are built from their sources. `unwanted` are taken out again: packages
    that others ask for and that do not work beside torch's CPU build.
    """

    name: str
    requirements: Path
    torch: bool = False
    without_dependencies: tuple[str, ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


def ready_venv(venv: Venv, cache: Path) -> Path:
    """The venv's Python. Raises InstallError."""
    folder = cache / venv.name
    python, stamp = folder / "bin" / "python", folder / "installed-for"
    wanted = _fingerprint(venv)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    log = cache / f"{venv.name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder), log=log)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    _run(*pip, "--upgrade", "pip", log=log)
    if venv.torch:
        _install_torch(pip, log)
    _run(*pip, "--requirement", str(venv.requirements), log=log)
    if venv.without_dependencies:
        # Sources are built with the torch that is here: a build environment of their own would fetch one with CUDA.
        alone = (*pip, "--no-deps", "--no-build-isolation", *venv.without_dependencies)
        _run(*alone, log=log, environment=venv.build_environment)
    if venv.unwanted:
        _run(str(python), "-m", "pip", "--quiet", "uninstall", "--yes", *venv.unwanted, log=log)
    stamp.write_text(wanted)
    return python


def ready_npm(packages: tuple[str, ...], folder: Path) -> None:
    """Install packages of Node into a folder of a venv, unless they are there. Raises InstallError."""
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == " ".join(packages):
        return
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text("{}")
    _run("npm", "install", "--silent", "--prefix", str(folder), *packages, log=folder.with_suffix(".log"))
    stamp.write_text(" ".join(packages))


def versions(python: Path, packages: tuple[str, ...]) -> str:
    """The installed versions of some packages, for people."""
    code = (
        "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _install_torch(pip: tuple[str, ...], log: Path) -> None:
    """The CPU build, from pip's own sources or torch's, as the Makefile does."""
    try:
        _run(*pip, f"torch=={TORCH_VERSION}+cpu", log=log)
    except InstallError:
        _run(*pip, f"torch=={TORCH_VERSION}", "--index-url", TORCH_CPU_INDEX, log=log)


def _fingerprint(venv: Venv) -> str:
    """Changes when the venv has to be made again."""
    parts = (
        sys.version,
        venv.requirements.read_text(),
        TORCH_VERSION if venv.torch else "",
        *venv.without_dependencies,
        *venv.unwanted,
        *(f"{name}={value}" for name, value in sorted(venv.build_environment.items())),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _run(*command: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=INSTALL_TIMEOUT_S,
                env={**os.environ, **(environment or {})},
            )
        except subprocess.TimeoutExpired:
            raise InstallError(f"pip took more than {INSTALL_TIMEOUT_S:g} s; see {log}") from None
    if done.returncode:
        tail = " / ".join(log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        raise InstallError(f"does not install: {tail}")
