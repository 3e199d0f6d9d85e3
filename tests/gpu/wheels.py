"""`make gpu-wheels`: the packages that a GPU machine without a package index lacks, as wheels in one folder.

The list follows from pyproject.toml: its dependencies and those of tests/gpu, and what they need in turn, without
what the machine has. pip finds the versions for the machine's Python, which need not be the one that runs this.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MOST_NBYTES = 42 << 20
MACHINE_HAS = ("torch", "triton", "numpy", "hf-xet")
"""What images with torch bring along, and a downloader of the hub, which is not reached."""
TESTS_NEED = ("pytest", "pytest-timeout", "pytest-xdist", "httpx", "hypothesis", "psutil")
"""Of the development dependencies."""
OLDEST_GLIBC, NEWEST_GLIBC = 5, 39


class WheelsError(Exception):
    """The folder could not be made."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-wheels")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine (default: 3.12)")
    parser.add_argument(
        "--has",
        type=Path,
        metavar="FREEZE",
        help=f"output of the machine's `pip freeze` (default: {', '.join(MACHINE_HAS)})",
    )
    options = parser.parse_args()
    has = MACHINE_HAS if options.has is None else frozen_names(options.has.read_text())
    try:
        fill(options.folder, options.python, {canonicalize_name(name) for name in has})
    except WheelsError as error:
        sys.exit(str(error))


def frozen_names(freeze: str) -> list[str]:
    """The packages of `pip freeze` (or of a list of names)."""
    lines = [line.split("#")[0].strip() for line in freeze.splitlines()]
    return [Requirement(line).name for line in lines if line and not line.startswith("-")]


def fill(folder: Path, python: str, has: set[str]) -> None:
    """Fill `folder` with one wheel of each package. Raises WheelsError."""
    wanted = resolve(wanted_of_project((ROOT / "pyproject.toml").read_text()), python, has)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _pip("download", "--quiet", "--dest", str(folder), *_for(python), *wanted)
    wheels = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    for name, size in wheels.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    total = sum(wheels.values())
    print(f"{total / 2**20:6.1f} MiB in {folder}: {len(wheels)} wheels for Python {python}")
    if total > MOST_NBYTES:
        raise WheelsError(f"more than {MOST_NBYTES >> 20} MiB: say with --has what the machine has")


def wanted_of_project(pyproject: str) -> list[Requirement]:
    """What running the service and tests/gpu needs."""
    project = tomllib.loads(pyproject)["project"]
    dev = [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    return [*map(Requirement, project["dependencies"]), *(one for one in dev if one.name in TESTS_NEED)]


def resolve(requirements: Iterable[Requirement], python: str, has: set[str]) -> list[str]:
    """`NAME==VERSION` of the requirements and of all that they need, without what the machine has."""
    asked: dict[str, list[str]] = {}
    new = list(requirements)
    while names := _add(asked, new, has):
        lines = [f"{name}{','.join(asked[name])}" for name in asked]
        metadata = _metadata(lines, python)
        found = {canonicalize_name(one["name"]): one for one in metadata}
        new = [need for name in names for need in needs(found[name].get("requires_dist", []), python)]
    return [f"{name}=={one['version']}" for name, one in sorted(found.items())]


def _add(asked: dict[str, list[str]], new: Iterable[Requirement], has: set[str]) -> list[str]:
    """Add requirements to `asked`. Returns the packages that were not there."""
    added = []
    for requirement in new:
        name = canonicalize_name(requirement.name)
        if name in has:
            continue
        if name not in asked:
            asked[name] = []
            added.append(name)
        asked[name] += [str(one) for one in requirement.specifier]
    return added


def needs(lines: Iterable[str], python: str) -> Iterator[Requirement]:
    """The requirements of a package's metadata that hold on the machine."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
        "extra": "",
    }
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def _metadata(lines: list[str], python: str) -> list[dict[str, Any]]:
    """What pip would install for exactly these requirements."""
    with tempfile.TemporaryDirectory(prefix="baton-wheels-") as scratch:
        report = Path(scratch) / "report.json"
        _pip(
            *("install", "--dry-run", "--quiet", "--ignore-installed"),
            *("--target", scratch, "--report", str(report), *_for(python), *lines),
        )
        return [one["metadata"] for one in json.loads(report.read_text())["install"]]


def _for(python: str) -> list[str]:
    """pip's options for wheels of the machine, without dependencies."""
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    return options + [word for platform in platforms for word in ("--platform", platform)]


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise WheelsError(f"pip {words[0]} has failed:\n{done.stderr}")


if __name__ == "__main__":
    main()
