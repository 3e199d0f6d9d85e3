"""The life of a request as a column of stamped stages, as in DistServe (Zhong et al., OSDI 2024)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

Clock = Callable[[], float]
"""Seconds. Real: `time.monotonic` for deadlines, `time.time` for stamps that travel."""


class Role(StrEnum):
    """What a node was started as."""

    PREFILL = "prefill"
    DECODE = "decode"


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A request entered `stage` on `role` at `time` (seconds since the epoch, that node's clock)."""

    role: str
    stage: str
    time: float


class ReqStage(StrEnum):
    """Where a request is in its life, on one node."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"


ALLOWED_MOVES: dict[ReqStage, frozenset[ReqStage]] = {
    ReqStage.QUEUED: frozenset({ReqStage.PREFILLING, ReqStage.TRANSFERRING, ReqStage.FINISHED}),
    ReqStage.PREFILLING: frozenset(
        {ReqStage.TRANSFERRING, ReqStage.DECODING, ReqStage.RETRACTED, ReqStage.FINISHED}
    ),
    ReqStage.TRANSFERRING: frozenset({ReqStage.DECODING, ReqStage.FINISHED}),
    ReqStage.DECODING: frozenset({ReqStage.RETRACTED, ReqStage.FINISHED}),
    ReqStage.RETRACTED: frozenset({ReqStage.PREFILLING, ReqStage.DECODING, ReqStage.FINISHED}),
    ReqStage.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Timeline:
    """The stages one request has entered on one node, with wall-clock times that travel to the client."""

    role: Role
    stage: ReqStage = ReqStage.QUEUED
    stamps: list[Stamp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stamps.append(Stamp(self.role, self.stage, time.time()))

    @property
    def left_prefilling(self) -> bool:
        """True while the latest move was out of PREFILLING: into decoding, or to the end."""
        return len(self.stamps) > 1 and self.stamps[-2].stage is ReqStage.PREFILLING

    def move_to(self, stage: ReqStage) -> None:
        """Enter `stage`; a move that the life of a request does not allow is a bug."""
        assert stage in ALLOWED_MOVES[self.stage], f"{self.stage} -> {stage}"
        self.stage = stage
        self.stamps.append(Stamp(self.role, stage, time.time()))
