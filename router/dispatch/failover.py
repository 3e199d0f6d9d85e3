"""What a sequence goes through when nodes fail under it.

A sequence that loses its nodes is sent to others, at once the first time, and after a growing pause each time that it
fails again without a new token. One that was on two nodes when they crashed is a suspect: its content may be what
crashes them. Suspects are tried on at most half of the decode nodes at a time, each alone on one node. Only a crash
of that node, after it has said that it holds no other request, convicts the suspect.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shared.errors import RequestError
from shared.timeline import FAILED_OVER, Stamp

MAX_FAILURES = 6
"""A sequence that fails so often in a row, without a new token between, ends with the last error."""
_FIRST_PAUSE_S = 0.1
_CRASHES_OF_A_SUSPECT = 2
TRIAL_TOKENS = 8
"""A suspect that has gone on for so many tokens beyond the place of the last crash is acquitted. Its node runs
nothing else until then."""


class Numerics(NamedTuple):
    """What decided about the bits of a sequence: `KVLayout.numerics` of the node that computed its prompt, and of the
    one that computed its output."""

    prompt: str
    output: str


class Loss(StrEnum):
    """How the connection to a node ended."""

    LEFT = "left"
    """The node said that it leaves, its process ended without an error, or it was removed."""
    BROKEN = "broken"
    """The node was silent or hung, or cannot be reached."""
    CRASHED = "crashed"
    """The process of the node seems to have ended by an error, of which a request may be the cause."""


class Cause(StrEnum):
    """Why a sequence is sent to other nodes."""

    PREFILL_NODE_LOST = "prefill_node_lost"
    DECODE_NODE_LOST = "decode_node_lost"
    NODE_DRAINED = "node_drained"
    NODE_FAILED = "node_failed"
    TRANSFER_FAILED = "transfer_failed"
    MOVE_FAILED = "move_failed"


@dataclass(eq=False)
class Failover:
    """The failures of one sequence.

    `avoid` has the incarnations of nodes that failed it, `crashed` of those that crashed under it. `since` is the
    time at which it lost its nodes, while it has none, `error` says why, and `cause` is counted once it has others.
    """

    num_failures: int = 0
    since: float | None = None
    error: RequestError | None = None
    cause: Cause | None = None
    split: bool = False
    avoid: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    stamps: list[Stamp] = field(default_factory=list)
    _failed_at: int = -1
    """The number of output tokens at the last failure."""
    _crashed_at: int = 0
    """The same at the last crash."""

    @property
    def is_suspect(self) -> bool:
        """True when the sequence may be what crashed its nodes."""
        return len(self.crashed) >= _CRASHES_OF_A_SUSPECT

    def crash(self, incarnation: str, num_tokens: int) -> None:
        """Note that a node has crashed under the sequence, behind `num_tokens` output tokens."""
        self.crashed.add(incarnation)
        self._crashed_at = num_tokens

    def may_have_crashed(self, incarnation: str, num_tokens: int) -> bool:
        """Whether the sequence was taken from this node, and has had no token since.

        Its peer may notice first that a node has crashed, and tell that a transfer has failed.
        """
        return incarnation in self.avoid and num_tokens == self._failed_at

    def failed(self, num_tokens: int, now: float, error: RequestError, cause: Cause) -> None:
        """Note that the sequence has lost its nodes behind `num_tokens` output tokens."""
        if cause is not Cause.NODE_DRAINED:
            self.num_failures = self.num_failures + 1 if num_tokens == self._failed_at else 1
            self._failed_at = num_tokens
        self.since, self.error, self.cause = now, error, cause
        self.stamps.append(Stamp("router", FAILED_OVER, time.time()))

    @property
    def pause_s(self) -> float:
        """How long the next attempt waits."""
        return _FIRST_PAUSE_S * 2 ** (self.num_failures - 2) if self.num_failures > 1 else 0.0

    def is_past_crashes(self, num_tokens: int) -> bool:
        """Whether `num_tokens` prove that the sequence has passed the place of the last crash, if there was one."""
        return not self.crashed or num_tokens >= self._crashed_at + TRIAL_TOKENS
