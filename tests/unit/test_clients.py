"""The runner of tests/clients, without running a client: its catalogue is whole, its table keeps what did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.catalog import CLIENTS
from tests.clients.outcome import BEGIN, END, Outcome, write_table

CLIENTS_FOLDER = Path(__file__).parents[1] / "clients"


def outcome(client: str, **changed: object) -> Outcome:
    values = {
        "version": "1.0",
        "proves": "all",
        "num_checks": 2,
        "errors": (),
        "seconds": 3.0,
        "day": "today",
    }
    return Outcome(client=client, **(values | changed))


def test_every_client_has_its_script_and_requirements_and_none_is_left_over() -> None:
    assert {client.script for client in CLIENTS} == {
        path.name for path in (CLIENTS_FOLDER / "scripts").glob("with_*.py")
    }
    assert {client.name for client in CLIENTS} == {
        path.stem for path in (CLIENTS_FOLDER / "requirements").glob("*.txt")
    }


def test_only_checks_that_ran_and_did_not_fail_are_a_pass() -> None:
    assert outcome("a").result == "pass (2 checks)"
    assert not outcome("a", num_checks=0).passed
    assert outcome("a", errors=("one: broke",)).result == "FAIL (1 failed, 2 checks)"


def test_the_table_keeps_rows_of_clients_that_did_not_run(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    write_table(page, [outcome("a"), outcome("gone")], ["a", "b", "gone"])
    write_table(page, [outcome("b", version="2 | 3", errors=("x",))], ["b", "a"])
    head, _, *rows = page.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    assert head.startswith("| client | version |")
    assert rows == [
        "| b | 2 / 3 | all | FAIL (1 failed, 2 checks) | 3 s | today |",
        "| a | 1.0 | all | pass (2 checks) | 3 s | today |",
    ]
    assert page.read_text().startswith("before\n") and page.read_text().endswith("\nafter\n")


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text("no table")
    with pytest.raises(ValueError, match="does not hold"):
        write_table(page, [outcome("a")], ["a"])
    assert page.read_text() == "no table"
