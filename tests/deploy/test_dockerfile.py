"""The Dockerfile by hadolint, and what both targets have in common. `make test-deploy` runs its steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.folder import DEPLOY, ROOT, parse
from tests.deploy.image import FOLDERS, stages

TEXT = (DEPLOY / "Dockerfile").read_text()
STAGES = stages(TEXT)
TARGETS = ("cpu", "cuda")


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "it is one of the dev requirements"
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_serves_and_is_asked_for_its_health() -> None:
    """Targets inherit it."""
    _, steps = STAGES["base"]
    assert sum(name == "HEALTHCHECK" for name, _ in steps) == 1
    (command,) = [rest for name, rest in steps if name == "CMD"]
    parse([word.strip(' "') for word in command.strip("[]").split(",")])


@pytest.mark.parametrize("target", TARGETS)
def test_a_target(target: str) -> None:
    before, steps = STAGES[target]
    assert before == "base"
    assert [rest for name, rest in steps if name == "USER"] == ["10001:10001"], "no root"
    assert ("RUN", "python -m shared.kernels.cpu") in steps
    assert not {"HEALTHCHECK", "CMD", "EXPOSE"} & {name for name, _ in steps}


def test_both_targets_have_the_same_of_baton() -> None:
    installed = ("COPY", "--from=wheel /wheels /wheels")
    cpu, cuda = (steps[steps.index(installed) :] for _, steps in (STAGES[target] for target in TARGETS))
    assert cpu == [step for step in cuda if step[0] != "ENV"]


def test_every_extra_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = sorted(project["optional-dependencies"].keys() - {"dev"})
    assert f"[{','.join(extras)}]" in dict(STAGES["wheel"][1])["RUN"]


def test_all_that_is_copied_is_let_in() -> None:
    let_in = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {word for name, rest in STAGES["wheel"][1] if name == "COPY" for word in rest.split()[:-1]}
    assert copied == let_in and all((ROOT / name).exists() for name in let_in)
    assert "/opt/baton" in FOLDERS
