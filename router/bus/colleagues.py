"""The other workers of this router, from the point of view of one of them. In a single process there are none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from router.bus.worker_bus import BusEnd
from router.bus.worker_messages import (
    Answer,
    Ask,
    MemberAdded,
    MemberRemoved,
    NotDone,
    Question,
    Replies,
    ToWorker,
)
from shared.errors import LinkError
from shared.log import warn

_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """Answers by worker, and why there is none from others, in words."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing_workers(self) -> dict[str, str] | UnsetType:
        """For an answer: nothing, if nobody is missing."""
        return dict(self.missing) or UNSET


class Colleagues(Protocol):
    """How a worker reaches the others."""

    @property
    def own_name(self) -> str | None:
        """What this worker is called; None when it is the only one."""
        ...

    async def ask(self, question: Question, timeout_s: float) -> Told:
        """Put a question to all others; takes hardly longer than `timeout_s`."""
        ...

    def note(self, change: MemberAdded | MemberRemoved) -> None:
        """Have workers that start later know of this."""
        ...


class NoColleagues:
    """A router in a single process."""

    own_name: str | None = None

    async def ask(self, question: Question, timeout_s: float) -> Told:
        """See Colleagues."""
        return Told()

    def note(self, change: MemberAdded | MemberRemoved) -> None:
        """See Colleagues."""


class BusColleagues:
    """Reaches the others through the parent."""

    def __init__(self, own_name: str, bus: BusEnd[ToWorker]) -> None:
        self.own_name: str | None = own_name
        self._bus = bus
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Replies]] = {}

    async def ask(self, question: Question, timeout_s: float) -> Told:
        """See Colleagues."""
        call_id = next(self._calls)
        replied = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._bus.send(Ask(call_id, question, timeout_s))
            async with asyncio.timeout(timeout_s + _GRACE_S):
                replies = await replied
        except TimeoutError:
            return Told(missing={"parent": f"no answer within {timeout_s:g} s"})
        except LinkError as e:
            return Told(missing={"parent": str(e)})
        finally:
            del self._waiting[call_id]
        missing = dict.fromkeys(replies.silent, f"no answer within {timeout_s:g} s")
        missing |= {name: a.reason for name, a in replies.answers.items() if isinstance(a, NotDone)}
        answers = {name: a for name, a in replies.answers.items() if not isinstance(a, NotDone)}
        return Told(answers=answers, missing=missing)

    def note(self, change: MemberAdded | MemberRemoved) -> None:
        """See Colleagues."""
        try:
            self._bus.send(change)
        except LinkError as e:
            warn("fleet_change_not_noted", change=type(change).__name__, reason=e)

    def on_replies(self, replies: Replies) -> None:
        """The parent has gathered what the others said."""
        waiting = self._waiting.get(replies.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(replies)
