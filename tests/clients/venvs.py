"""A venv for each client, made once and again when what it needs has changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.catalog import Client

TORCH_VERSION = os.environ.get("TORCH_VERSION", "2.13.0")
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_TIMEOUT_S = 1800.0
LOG_TAIL_LINES = 5


class InstallError(Exception):
    """A client could not be installed; the message holds pip's last words."""


def ready_venv(client: Client, cache: Path) -> Path:
    """The Python of the client's venv. Raises InstallError."""
    folder = cache / client.name
    python, stamp = folder / "bin" / "python", folder / "installed-for"
    wanted = _fingerprint(client)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder), log=cache / f"{client.name}.log")
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    log = cache / f"{client.name}.log"
    _run(*pip, "--upgrade", "pip", log=log)
    if client.torch:
        _install_torch(pip, log)
    _run(*pip, "--requirement", str(_requirements(client)), log=log)
    if client.without_dependencies:
        # Sources are built with the torch that is here: a build environment of their own would fetch one with CUDA.
        alone = (*pip, "--no-deps", "--no-build-isolation", *client.without_dependencies)
        _run(*alone, log=log, environment=client.build_environment)
    stamp.write_text(wanted)
    return python


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


def _requirements(client: Client) -> Path:
    return REQUIREMENTS / f"{client.name}.txt"


def _fingerprint(client: Client) -> str:
    """Changes when the venv has to be made again."""
    parts = (
        sys.version,
        _requirements(client).read_text(),
        TORCH_VERSION if client.torch else "",
        *client.without_dependencies,
        *(f"{name}={value}" for name, value in sorted(client.build_environment.items())),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _run(*command: str, log: Path, environment: dict[str, str] | None = None) -> None:
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
