"""What a worker answers to its colleagues, and what it makes of a bus that nobody reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.api.worker_answers import WorkerAnswers
from router.bus.colleagues import BusColleagues
from router.bus.worker_messages import Changed, DrainNode, MemberRemoved, NotDone, Prove, TellMetrics
from router.nodes.fleet_changes import FleetChanges
from shared.errors import LinkError


class NobodyKnown:
    """A membership without members."""

    members = ()

    def __init__(self) -> None:
        self.turned_away: list[str] = []

    def turn_away(self, incarnation: str) -> None:
        self.turned_away.append(incarnation)


def answers(**parts: Any) -> WorkerAnswers:
    defaults = dict.fromkeys(("generator", "metrics", "changes", "prove"))
    return WorkerAnswers(**{**defaults, **parts})


def test_a_node_that_is_not_known_here_yet_is_turned_away_when_it_comes() -> None:
    membership: Any = NobodyKnown()
    changes = FleetChanges(membership, SimpleNamespace())  # type: ignore[arg-type]
    for incarnation in ("decode-0-a", ""):
        question = DrainNode("tcp://127.0.0.1:9", incarnation, 1.0)
        assert asyncio.run(answers(changes=changes).answer(question)) == Changed()
    assert membership.turned_away == ["decode-0-a"]


def test_a_bug_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def prove(prompt: str, max_new_tokens: int) -> str:
        raise ZeroDivisionError

    assert asyncio.run(answers(prove=prove).answer(Prove("a", 1))) == NotDone("internal error")
    assert "answer_failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_bus_that_is_not_read_makes_colleagues_missing(caplog: pytest.LogCaptureFixture) -> None:
    def send(message: object) -> None:
        raise LinkError("9 bytes wait to be read")

    async def run() -> None:
        bus: Any = SimpleNamespace(send=send)
        colleagues = BusColleagues("0", bus)
        told = await colleagues.ask(TellMetrics(), 1.0)
        assert told.missing == {"parent": "9 bytes wait to be read"} and not told.answers
        colleagues.note(MemberRemoved("tcp://127.0.0.1:9", "a"))

    asyncio.run(run())
    assert "fleet_change_not_noted" in caplog.text
