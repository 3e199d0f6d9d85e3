"""The kill matrix: what dies, while the requests are where. Each cell runs, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tests.fault.matrix.holding import Stage


class Fault(StrEnum):
    """What happens to the fleet. The decode node is that of the requests; when they move, the other is the target."""

    PREFILL_KILLED = "prefill node killed"
    DECODE_KILLED = "decode node killed"
    DECODES_KILLED = "both decode nodes killed"
    TARGET_KILLED = "target of the moves killed"
    LINK_LOST = "link lost"
    PARTITION = "network partition"
    PREFILL_STOPPED = "prefill node: SIGSTOP"
    DECODE_STOPPED = "decode node: SIGSTOP"
    TARGET_STOPPED = "target of the moves: SIGSTOP"
    PREFILL_STALLED = "prefill node: loop stalled"
    DECODE_STALLED = "decode node: loop stalled"
    ROUTER_KILLED = "router killed"
    CLIENT_GONE = "client gone"


class Transport(StrEnum):
    """What carries the pages."""

    SHM = "shm"
    GLOO = "gloo"


@dataclass(frozen=True)
class Cell:
    """One fault in one stage over one transport."""

    fault: Fault
    stage: Stage
    transport: Transport

    def __str__(self) -> str:
        return f"{self.fault} / {self.stage} / {self.transport}"


LEAVING = (Stage.MOVING, Stage.DRAINING)
"""Stages in which the requests are on their way from one decode node to the other."""

NOT_RUN: dict[tuple[Fault | None, Stage | None], str] = {
    (Fault.PARTITION, None): "pending: the nodes of the matrix share one network namespace",
    (Fault.CLIENT_GONE, Stage.ABORTING): "the two requests that are left are as in `transferring`",
    **{
        (fault, stage): "only requests that are on their way have a target"
        for fault in (Fault.TARGET_KILLED, Fault.TARGET_STOPPED)
        for stage in Stage
        if stage not in LEAVING
    },
}
"""Why cells do not run; None stands for every fault, or every stage."""


def why_not(fault: Fault, stage: Stage) -> str | None:
    """Why this cell is not run, if it is not."""
    keys = ((None, stage), (fault, None), (fault, stage))
    return next((NOT_RUN[key] for key in keys if key in NOT_RUN), None)


CELLS = tuple(
    Cell(fault, stage, transport)
    for transport in Transport
    for stage in Stage
    for fault in Fault
    if why_not(fault, stage) is None
)
