"""What a sequence goes through when nodes fail under it, and which of the sequences are tried alone.

A sequence that loses its nodes is sent to others, at once the first time, and after a growing pause each time that it
fails again without a new token. One that was on two nodes when they crashed is a suspect: its content may be what
crashes them. Suspects are tried one at a time, each on one node, and only a crash of that node while it has no other
request convicts the suspect.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import RequestError
from shared.timeline import FAILED_OVER, Stamp

if TYPE_CHECKING:
    from router.dispatch.running_req import Node, RunningReq

MAX_FAILURES = 6
"""A sequence that fails so often in a row, without a new token between, ends with the last error."""
_FIRST_PAUSE_S = 0.1
_CRASHES_OF_A_SUSPECT = 2
_TRIAL_TOKENS = 16
"""A suspect that has gone on for so many tokens beyond the place of the last crash is acquitted."""


class Numerics(NamedTuple):
    """What decided about the bits of a sequence: `KVLayout.numerics` of the node that computed its prompt, and of the
    one that computed its output."""

    prompt: str
    output: str


class Cause(StrEnum):
    """Why a sequence is sent to other nodes."""

    PREFILL_NODE_LOST = "prefill_node_lost"
    DECODE_NODE_LOST = "decode_node_lost"
    NODE_DRAINED = "node_drained"
    NODE_FAILED = "node_failed"
    TRANSFER_FAILED = "transfer_failed"
    MOVE_FAILED = "move_failed"
    NOT_CACHED = "not_cached"


@dataclass(eq=False)
class Failover:
    """The failures of one sequence.

    `avoid` has the incarnations of nodes that failed it, `crashed` of those that crashed under it. `since` is the
    time at which it lost its nodes, while it has none, and `error` why it lost them.
    """

    num_failures: int = 0
    since: float | None = None
    error: RequestError | None = None
    split: bool = False
    avoid: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    stamps: list[Stamp] = field(default_factory=list)
    _failed_at: int = -1
    """The number of output tokens at the last failure."""

    @property
    def is_suspect(self) -> bool:
        """True when the sequence may be what crashed its nodes."""
        return len(self.crashed) >= _CRASHES_OF_A_SUSPECT

    def failed(self, num_tokens: int, now: float, error: RequestError, *, counts: bool) -> None:
        """Note that the sequence has lost its nodes behind `num_tokens` output tokens; it `counts` as a failure."""
        if counts:
            self.num_failures = self.num_failures + 1 if num_tokens == self._failed_at else 1
            self._failed_at = num_tokens
        self.since, self.error = now, error
        self.stamps.append(Stamp("router", FAILED_OVER, time.time()))

    @property
    def pause_s(self) -> float:
        """How long the next attempt waits."""
        return _FIRST_PAUSE_S * 2 ** (self.num_failures - 2) if self.num_failures > 1 else 0.0

    def acquit_after(self, num_tokens: int) -> bool:
        """Forget the crashes once `num_tokens` prove that the sequence has passed the place of the last one."""
        if num_tokens < self._failed_at + _TRIAL_TOKENS:
            return False
        self.crashed.clear()
        return True


class Quarantine:
    """The one suspect that is being tried, and its node. Other work goes to other nodes if there are any."""

    def __init__(self) -> None:
        self.suspect: RunningReq | None = None

    @property
    def node(self) -> Node | None:
        """The node that runs the suspect."""
        return next(iter(self.suspect.attempt.holders), None) if self.suspect is not None else None

    def end(self, req: RunningReq) -> None:
        """Let the next suspect be tried if `req` was the one: it has ended, failed, or been acquitted."""
        if self.suspect is req:
            self.suspect = None
