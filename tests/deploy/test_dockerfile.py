"""The Dockerfile by hadolint, and what both targets have in common. `make test-deploy` runs its steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.mark.parametrize("target", TARGETS)
def test_a_target(target: str) -> None:
    before, steps = STAGES[target]
    assert before == "base"
    assert [rest for name, rest in steps if name == "USER"] == ["10001:10001"], "no root"
    assert sum(name == "HEALTHCHECK" for name, _ in steps) == 1
    assert ("RUN", "python -m shared.kernels.cpu") in steps
    (command,) = [rest for name, rest in steps if name == "CMD"]
    parse([word.strip(' "') for word in command.strip("[]").split(",")])


def test_both_targets_serve_in_the_same_way() -> None:
    shared = {"USER", "COPY", "WORKDIR", "EXPOSE", "HEALTHCHECK", "CMD"}
    cpu, cuda = ([step for step in STAGES[target][1] if step[0] in shared] for target in TARGETS)
    assert cpu == cuda


def test_all_that_is_copied_is_let_in() -> None:
    let_in = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {word for name, rest in STAGES["wheel"][1] if name == "COPY" for word in rest.split()[:-1]}
    assert copied == let_in and all((ROOT / name).exists() for name in let_in)
    assert "/opt/baton" in FOLDERS
