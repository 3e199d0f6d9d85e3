"""The systemd units, as systemd-analyze reads them, and their commands."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.folder import DEPLOY, parse

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def read(unit: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze reads the units")
def test_systemd_understands_each(tmp_path: Path) -> None:
    for program in ("router", "prefill-node", "decode-node"):
        (tmp_path / program).touch(mode=0o755)
    copies = [tmp_path / unit.name for unit in UNITS]
    for unit, copy in zip(UNITS, copies, strict=True):
        copy.write_text(unit.read_text().replace("/opt/baton/bin", str(tmp_path)))

    def verify() -> str:
        argv = ["systemd-analyze", "verify", "--man=no", *map(str, copies)]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SYSTEMD_LOG_LEVEL": "notice"},
        )
        return "".join(
            line for line in done.stderr.splitlines(True) if str(tmp_path) in line or "baton" in line
        )

    assert verify() == ""
    copies[-1].write_text(copies[-1].read_text().replace("KillMode", "KilMode"))
    assert "KilMode" in verify(), "it does complain"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_commands(unit: Path) -> None:
    service = read(unit)
    credential, _, _ = service["LoadCredential"].partition(":")
    program, *flags = service["ExecStart"].split()
    assert Path(program).parent == Path("/opt/baton/bin")
    variable = flags.pop()
    assert variable.startswith("$") and service["EnvironmentFile"].startswith("/etc/baton/")
    assert variable[1:] in unit.read_text().splitlines()[0], "the first line tells what to put there"
    parsed = parse([Path(program).name, *flags])
    assert parsed.fleet_key == ["${CREDENTIALS_DIRECTORY}/" + credential]
    longest_s = parsed.drain_timeout_s + getattr(parsed, "stop_timeout_s", 0)
    assert float(service["TimeoutStopSec"]) > longest_s
    example = unit.read_text().splitlines()[0].split("such as ")[1].split()
    parse([Path(program).name, *flags, *example])
