"""The stages of a sequence as intervals on the router's clock, for traces.

A node's stamps are on its own clock. What is known of that clock: the node heard of the sequence after the router had
sent it, and reported before the router heard. Stamps that contradict this are shifted, all of one node by the same
time, and by as little as is possible. So stages keep their lengths, and clocks that agree are left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.protocol.messages import Role, Stamp
from shared.timeline import ReqStage

if TYPE_CHECKING:
    from router.dispatch.running_req import Attempt, Node, RunningReq


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stay in a stage, from `began` to `ended`, in seconds of the router's clock."""

    node: Node
    attempt: int
    stage: str
    began: float
    ended: float


def stage_spans(req: RunningReq, wall_s: float) -> list[StageSpan]:
    """The stages of a sequence that has ended, of all attempts and on all nodes that reported.

    `wall_s` is what has to be added to the router's clock of deadlines to get seconds since the epoch.
    """
    assert req.ended_at is not None
    lives = [
        (attempt, node, _on_routers_clock(attempt, node, stamps, wall_s))
        for attempt, node, stamps in _lives(req)
    ]
    spans: list[StageSpan] = []
    for attempt, node, stamps in lives:
        end = req.ended_at + wall_s
        if node.role is Role.PREFILL:  # its part ends when the decode node has all pages
            end = _decoding_since(attempt, lives) or end
        for stamp, after in itertools.zip_longest(stamps, stamps[1:]):
            if stamp.stage != ReqStage.FINISHED:
                over = after.time if after is not None else end
                spans.append(
                    StageSpan(node, attempt.key.attempt, stamp.stage, stamp.time, max(stamp.time, over))
                )
    return spans


_Life = tuple["Attempt", "Node", list[Stamp]]


def _lives(req: RunningReq) -> list[_Life]:
    """What each node of each attempt has stamped. A node reports also the stamps of the node that it took over from,
    so the longest list that begins with the same stamp counts."""
    longest: dict[Stamp, list[Stamp]] = {}
    owners: dict[Stamp, tuple[Attempt, Node]] = {}
    for attempt in req.attempts:
        nodes = {node.role: node for node in attempt.nodes}
        for role, report in attempt.reports.items():
            segments = list(_segments(report.stamps))
            for segment in segments:
                if len(segment) > len(longest.get(segment[0], ())):
                    longest[segment[0]] = segment
            for segment in segments[-1:] if role in nodes else ():
                owners.setdefault(segment[0], (attempt, nodes[role]))
            for segment in segments[:-1]:
                if segment[0].role == Role.PREFILL and Role.PREFILL in nodes:
                    owners.setdefault(segment[0], (attempt, nodes[Role.PREFILL]))
    return [(*owner, longest[first]) for first, owner in owners.items()]


def _segments(stamps: Sequence[Stamp]) -> Iterator[list[Stamp]]:
    """The stamps of one node each: every node begins with QUEUED."""
    segment: list[Stamp] = []
    for stamp in stamps:
        if segment and stamp.stage == ReqStage.QUEUED:
            yield segment
            segment = []
        segment.append(stamp)
    if segment:
        yield segment


def _on_routers_clock(attempt: Attempt, node: Node, stamps: Sequence[Stamp], wall_s: float) -> list[Stamp]:
    least = attempt.sent_at + wall_s - stamps[0].time
    own = attempt.reports.get(node.role)
    most = float("inf")
    if own is not None and own.stamps:
        most = attempt.heard_at[node.role] + wall_s - own.stamps[-1].time
    shift = min(max(0.0, least), most) if least <= most else least
    return [Stamp(stamp.role, stamp.stage, stamp.time + shift) for stamp in stamps]


def _decoding_since(attempt: Attempt, lives: Sequence[_Life]) -> float | None:
    times = (
        stamp.time
        for other, node, stamps in lives
        for stamp in stamps
        if other is attempt and node.role is Role.DECODE and stamp.stage == ReqStage.DECODING
    )
    return next(times, None)
