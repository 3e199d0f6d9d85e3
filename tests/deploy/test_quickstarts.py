"""The commands of the quickstarts are those of the programs, and the files that they name are here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.deploy.folder import ROOT, parse

QUICKSTARTS = sorted((ROOT / "docs").glob("quickstart-*.md"))
PROGRAMS = ("router", "prefill-node", "decode-node")
MADE = ("deploy/.env", "deploy/kubernetes/base/fleet.key")
"""Files that a reader makes."""


def commands(text: str) -> list[list[str]]:
    """The commands of the code blocks, as a shell would split them. A quoted text may go on in the next line."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        command = ""
        for line in block.splitlines():
            command += f"{line}\n"
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quote that has not ended yet
                continue
            found += [words] if words else []
            command = ""
        assert not command.strip(), "a quote that does not end"
    return found


@pytest.mark.parametrize("page", QUICKSTARTS, ids=lambda page: page.stem)
def test_a_page(page: Path) -> None:
    text = page.read_text()
    for command in commands(text):
        program = Path(command[0]).name
        if program in PROGRAMS:
            assert command[0] == f".venv/bin/{program}"
            parse([program, *command[1:]])
    for found in re.findall(r"\bdeploy/[\w./-]*\w", text):
        assert found in MADE or (ROOT / found).exists(), found
    assert f"docs/{page.name}" in (ROOT / "README.md").read_text()


def test_there_are_three() -> None:
    assert [page.stem.removeprefix("quickstart-") for page in QUICKSTARTS] == [
        "kubernetes",
        "one-machine",
        "two-machines",
    ]


def test_flags_of_systemd_in_the_page() -> None:
    page = (ROOT / "docs/quickstart-two-machines.md").read_text()
    found = re.findall(r'"\w+_FLAGS=(.*?)" > /etc/baton/(.*?)\.env', page)
    assert sorted(program for _, program in found) == sorted(PROGRAMS)
    for flags, program in found:
        parse([program, *flags.split()])


def test_torch_of_the_page_is_that_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = ("TORCH_VERSION", "TORCH_CPU_INDEX")
    version, index = (re.findall(rf"^{name} \?= (\S+)$", makefile, re.MULTILINE)[0] for name in names)
    page = (ROOT / "docs/quickstart-two-machines.md").read_text()
    assert f'"torch=={version}" --index-url {index} ' in page
