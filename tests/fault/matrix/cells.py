"""The kill matrix: what dies, while the requests are where. Each cell runs, or says why it cannot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum

from tests.fault.matrix.holding import Stage


class Fault(StrEnum):
    """What happens to the fleet. The decode node is that of the requests; when they move, the other is the target."""

    NONE = "nothing"
    PREFILL_KILLED = "prefill node killed"
    DECODE_KILLED = "decode node killed"
    DECODES_KILLED = "both decode nodes killed"
    TARGET_KILLED = "target of the moves killed"
    LINK_LOST = "link lost"
    PREFILL_CUT_OFF = "partition: prefill node cut off"
    DECODE_CUT_OFF = "partition: decode node cut off"
    CUT_APART = "partition: the ends of the transfer cut apart"
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
    TCP = "tcp"
    TLS = "tls"


@dataclass(frozen=True)
class Cell:
    """One fault in one stage over one transport."""

    fault: Fault
    stage: Stage
    transport: str
    """As /fleet names it."""

    def __str__(self) -> str:
        return f"{self.fault} / {self.stage} / {self.transport}"


PARTITIONS = (Fault.PREFILL_CUT_OFF, Fault.DECODE_CUT_OFF, Fault.CUT_APART)
"""Faults of a fleet whose nodes have network namespaces of their own. They are healed when the router has noticed."""

LEAVING = (Stage.MOVING, Stage.DRAINING)
"""Stages in which the requests are on their way from one decode node to the other."""

NOT_RUN: dict[tuple[Fault, Stage | Transport], str] = {
    **{
        (fault, Transport.SHM): "not over shm: no memory is shared between namespaces" for fault in PARTITIONS
    },
    (Fault.CLIENT_GONE, Stage.ABORTING): "the two requests that are left are as in `transferring`",
    **{
        (fault, stage): "only requests that are on their way have a target"
        for fault in (Fault.TARGET_KILLED, Fault.TARGET_STOPPED)
        for stage in Stage
        if stage not in LEAVING
    },
}
"""Why cells do not run."""


def why_not(cell: Cell) -> str | None:
    """Why this cell is not run, if it is not."""
    return NOT_RUN.get((cell.fault, cell.stage)) or NOT_RUN.get((cell.fault, cell.transport))


CELLS = tuple(
    cell
    for cell in itertools.starmap(Cell, itertools.product(Fault, Stage, Transport))
    if why_not(cell) is None
)
