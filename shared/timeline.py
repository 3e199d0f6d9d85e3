"""The stages of a request's life, each with the time of its entry, as in DistServe (OSDI 2024); rates of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

Clock = Callable[[], float]
"""Returns seconds: `time.monotonic` for deadlines, `time.time` for stamps that are sent to other processes."""


class Role(StrEnum):
    """The role of a node."""

    PREFILL = "prefill"
    DECODE = "decode"


MAX_STAMP_S = 1e10
"""In the year 2286. No stamp that comes from another process is later, so that traces can count nanoseconds."""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a request into `stage` on a node of `role`. `time` is seconds since the epoch, on its clock."""

    role: str
    stage: str
    time: Annotated[float, msgspec.Meta(ge=0, le=MAX_STAMP_S)]


class ReqStage(StrEnum):
    """The stage of a request on one node."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"


FAILED_OVER = "failed_over"
"""The router's stage of a request that lost its nodes, from then on."""

ALLOWED_MOVES: dict[ReqStage, frozenset[ReqStage]] = {
    ReqStage.QUEUED: frozenset({ReqStage.PREFILLING, ReqStage.TRANSFERRING, ReqStage.FINISHED}),
    ReqStage.PREFILLING: frozenset(
        {ReqStage.TRANSFERRING, ReqStage.DECODING, ReqStage.RETRACTED, ReqStage.FINISHED}
    ),
    ReqStage.TRANSFERRING: frozenset({ReqStage.DECODING, ReqStage.FINISHED}),
    ReqStage.DECODING: frozenset({ReqStage.RETRACTED, ReqStage.TRANSFERRING, ReqStage.FINISHED}),
    ReqStage.RETRACTED: frozenset({ReqStage.PREFILLING, ReqStage.DECODING, ReqStage.FINISHED}),
    ReqStage.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Timeline:
    """The stages that one request has entered on one node. The client gets them with `return_timeline`."""

    role: Role
    stage: ReqStage = ReqStage.QUEUED
    stamps: list[Stamp] = field(default_factory=list)
    clock: Clock = time.time

    def __post_init__(self) -> None:
        self.stamps.append(Stamp(self.role, self.stage, self.clock()))

    @property
    def left_prefilling(self) -> bool:
        """True when the last move was out of PREFILLING."""
        return len(self.stamps) > 1 and self.stamps[-2].stage is ReqStage.PREFILLING

    def move_to(self, stage: ReqStage) -> None:
        """Enter `stage`. A move that is not in ALLOWED_MOVES is a bug."""
        assert stage in ALLOWED_MOVES[self.stage], f"{self.stage} -> {stage}"
        self.stage = stage
        self.stamps.append(Stamp(self.role, stage, self.clock()))


PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_TRANSFER_BYTES_PER_S = 1e9
"""Believed until something was measured; a few measurements outweigh them."""
PRIOR_WEIGHT_S = 0.01
DECAY = 0.9
"""What is left of a measurement's weight with each later one: about the last ten count."""


class MovingRate:
    """Work done per second, as a moving average of sums, so that long measurements count for more than short ones."""

    def __init__(self, prior: float) -> None:
        self._work = prior * PRIOR_WEIGHT_S
        self._seconds = PRIOR_WEIGHT_S
        self._is_measured = False

    @property
    def per_second(self) -> float:
        """The present estimate; always positive."""
        return self._work / self._seconds

    @property
    def measured(self) -> float:
        """The present estimate; 0 until something was measured."""
        return self.per_second if self._is_measured else 0.0

    def observe(self, work: float, seconds: float) -> None:
        """`work` took `seconds`. A measurement of no time or no work is ignored."""
        if work <= 0 or seconds <= 0:
            return
        self._is_measured = True
        self._work = self._work * DECAY + work
        self._seconds = self._seconds * DECAY + seconds
