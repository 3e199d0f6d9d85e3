"""`make test-clients`: real clients and load generators, each in a venv of its own, against real routers.

`make test-clients ARGS="openai litellm"` runs these alone. Venvs are kept in .clients/ and made again when the
requirements of a client change. The results go into the table of docs/clients.md; exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.clients.catalog import CLIENTS, Client
from tests.clients.outcome import Outcome, write_table
from tests.clients.servers import Servers, running
from tests.venvs import InstallError, ready_npm, ready_venv, versions

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TABLE = ROOT / "docs" / "clients.md"
LOG_TAIL_CHARS = 4000
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""No client asks a hub, and none tells anybody that it ran."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named clients, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(c.name for c in CLIENTS)} (default: all)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".clients", help="where the venvs are kept")
    args = parser.parse_args(argv)
    known = {client.name: client for client in CLIENTS}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.names] or list(CLIENTS)
    pythons = {client.name: _install(client, args.cache) for client in chosen}
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as folder, running(Path(folder)) as servers:
        outcomes = [_run(client, pythons[client.name], servers, Path(folder)) for client in chosen]
    write_table(TABLE, outcomes, list(known))
    _report(outcomes)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _install(client: Client, cache: Path) -> Path | InstallError:
    print(f"installing {client.name} into {cache / client.name}", file=sys.stderr, flush=True)
    try:
        python = ready_venv(client.venv, cache)
        if client.npm:
            ready_npm(client.npm, python.parents[1] / "node")
    except InstallError as e:
        return e
    return python


def _run(client: Client, python: Path | InstallError, servers: Servers, folder: Path) -> Outcome:
    if isinstance(python, InstallError):
        return _outcome(client, "", 0, [str(python)], 0.0)
    print(f"\n{client.name}:", flush=True)
    home = folder / client.name
    home.mkdir()
    started = time.monotonic()
    num_checks, errors = _checked(client, python, servers, home)
    seconds = time.monotonic() - started
    try:
        servers.check_clean()
    except AssertionError as e:
        errors.append(f"what it left in the router: {e}")
    return _outcome(client, versions(python, client.version_of), num_checks, errors, seconds)


def _checked(client: Client, python: Path, servers: Servers, home: Path) -> tuple[int, list[str]]:
    """The number of checks, and what failed. The script sees none of this user's settings and keys."""
    outcomes = home / "outcomes.json"
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "BATON_OUTCOMES": str(outcomes),
        **OFFLINE,
        **servers.environment(),
        "BATON_NODE_PACKAGES": str(python.parents[1] / "node"),
    }
    log = home / "log"
    if not _ended([str(python), str(SCRIPTS / client.script)], home, environment, log, client.timeout_s):
        print(log.read_text(errors="replace")[-LOG_TAIL_CHARS:])
        return 0, [f"has not ended within {client.timeout_s:g} s"]
    if not outcomes.is_file():
        print(log.read_text(errors="replace")[-LOG_TAIL_CHARS:])
        return 0, ["the script ended before its checks did"]
    checks = json.loads(outcomes.read_text())
    for check in checks:
        print(
            f"  {'FAIL' if check['error'] else 'ok  '} {check['name']} ({check['seconds']:.1f} s)", flush=True
        )
    errors = [f"{check['name']}: {check['error']}" for check in checks if check["error"]]
    if errors:
        print(log.read_text(errors="replace")[-LOG_TAIL_CHARS:])
    return len(checks), errors


def _ended(
    command: list[str], folder: Path, environment: dict[str, str], log: Path, timeout_s: float
) -> bool:
    """Whether it ended by itself in time. What it started is ended with it: load generators have workers."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(client: Client, version: str, num_checks: int, errors: list[str], seconds: float) -> Outcome:
    return Outcome(
        client=client.name,
        version=version,
        proves=client.proves,
        num_checks=num_checks,
        errors=tuple(errors),
        seconds=seconds,
        day=date.today().isoformat(),
    )


def _report(outcomes: Sequence[Outcome]) -> None:
    print()
    for outcome in outcomes:
        print(f"{outcome.client:<14} {outcome.result:<22} {outcome.seconds:5.0f} s  {outcome.version}")
        for error in outcome.errors:
            print(f"    {error}")


if __name__ == "__main__":
    sys.exit(main())
