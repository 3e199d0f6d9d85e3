"""The stages of a sequence: one record of what nodes have stamped, from which everything that tells of them reads.

    stages_of(req) ──▶ NodeStages of each node ─┬─ stays: seconds of each stage      /metrics, the request log
                                                ├─ measure_start: the first token    timeline, slow_because
                                                └─ stage_spans                       traces

Durations come from the stamps of one node each, since the clocks of two hosts are never compared. What the time to
the first token went to:

    dispatch       until the router had nodes for it                           should cost: no time
    failover       attempts that lost their nodes                              no time
    reservation    until the decode node had pages and a row for it            no time
                   (without the time in which the prompt was computed ahead)
    fetch          until cached pages had come from another node,              what prefill of these tokens would;
                   or would come no more                                       no time if none came
    queue          until the node that prefills began with it                  no time
    prefill        while its prompt was computed, ahead of that or behind it   its tokens, at the node's measured rate
    delivery       the rest: messages, the loops of nodes and router           no time
    (first token)
    transfer       until the decode node had all its pages and went on         its bytes, at the node's measured rate

Both nodes hear of the sequence at the same time. Of the time that the prefill node kept it queued, the decode
node's share is therefore the reservation, what a fetch took beyond that is the fetch, and the rest is the queue. What
is left of the transfer stage behind fetch, queue and prefill is the transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from router.http.answer import Answer
from shared.protocol.messages import ReqKey, ReqReport, Role, Stamp
from shared.timeline import ReqStage

if TYPE_CHECKING:
    from router.dispatch.node import Node
    from router.dispatch.running_req import Attempt, RunningReq

MIN_EXCESS_S = 0.05
"""A shorter excess makes nothing slow: turns of a scheduler and messages differ by milliseconds."""
MIN_EXCESS_SHARE = 0.5
"""Nor does an excess of less than this share of the stage's time: it took less than twice what it should."""
SHORT_PROMPT_TOKENS, SMALL_TRANSFER_NBYTES = 64, 1 << 20
"""Work of less takes as long as work of so much. Nodes measure their rates by larger work."""


@dataclass(frozen=True)
class NodeStages:
    """What one node has stamped of one attempt, in order."""

    attempt: Attempt
    node: Node
    stamps: Sequence[Stamp]

    @property
    def stays(self) -> list[tuple[str, float]]:
        """The seconds of each stay in a stage that was left."""
        return [(a.stage, max(0.0, b.time - a.time)) for a, b in itertools.pairwise(self.stamps)]

    @cached_property
    def first_stays(self) -> dict[str, float]:
        """Of each stage the seconds of the first stay."""
        return dict(reversed(self.stays))


def stages_of(req: RunningReq) -> list[NodeStages]:
    """What each node of each attempt has stamped so far.

    A node reports also the stamps of the node that it took over from, so the longest list that begins with the same
    stamp counts.
    """
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
    return [NodeStages(*owner, longest[first]) for first, owner in owners.items()]


def _segments(stamps: Sequence[Stamp]) -> Iterator[list[Stamp]]:
    """The stamps of one node each: every node begins with QUEUED, and has one role."""
    segment: list[Stamp] = []
    for stamp in stamps:
        if segment and (stamp.stage == ReqStage.QUEUED or stamp.role != segment[-1].role):
            yield segment
            segment = []
        segment.append(stamp)
    if segment:
        yield segment


def _in_order(part: NodeStages) -> tuple[int, bool]:
    """Earlier attempts first, and of one attempt the prefill node."""
    return part.attempt.key.attempt, part.node.role is Role.DECODE


# -------------------------------------------------------------------------------------------- the first token
class StartStage(StrEnum):
    """A stage of a sequence up to its second token, in this order."""

    DISPATCH = "dispatch"
    FAILOVER = "failover"
    RESERVATION = "reservation"
    FETCH = "fetch"
    QUEUE = "queue"
    PREFILL = "prefill"
    DELIVERY = "delivery"
    TRANSFER = "transfer"


class StageTime(Answer, frozen=True):
    """How long one stage of a start took. Times of one stage are by the clock of one machine."""

    stage: StartStage
    node: Annotated[str, Meta(description="Its id, two for a transfer; empty for a stage of the router.")]
    seconds: float
    expected_s: Annotated[
        float | None, Meta(description="What it should cost; null while no rate of the node is known.")
    ] = 0.0

    @property
    def excess_s(self) -> float:
        """Seconds beyond what it should cost; 0 when that is unknown."""
        return 0.0 if self.expected_s is None else max(0.0, self.seconds - self.expected_s)


class Start(Answer, kw_only=True, frozen=True):
    """What the time to the first token went to; `transfer` is the wait for the second token."""

    ttft_s: float
    slow_because: Annotated[
        StartStage | None,
        Meta(description="The stage longest beyond what it should cost; null if none was slow."),
    ]
    stages: list[StageTime]


def worst_of(stages: Sequence[StageTime]) -> StageTime | None:
    """Of the stages that were slow, the one with the largest excess; None if no stage was."""
    slow = [s for s in stages if s.excess_s >= max(MIN_EXCESS_S, MIN_EXCESS_SHARE * s.seconds)]
    return max(slow, key=lambda stage: stage.excess_s, default=None)


def measure_start(req: RunningReq) -> Start | None:
    """How a sequence started; None until the nodes have reported every stage of it."""
    parts = stages_of(req)
    by = min((p for p in parts if ReqStage.PREFILLING in p.first_stays), key=_in_order, default=None)
    if by is None or req.first_token_at is None:
        return None
    attempt, node, name = by.attempt, by.node, by.node.ref.node_id
    decode = next((n for n in attempt.nodes if n.role is Role.DECODE and n is not node), None)
    queued_s, prefill_s = by.first_stays.get(ReqStage.QUEUED, 0.0), by.first_stays[ReqStage.PREFILLING]
    reserved_s = transfer_s = 0.0
    if decode is not None:
        of_decode = next((p.first_stays for p in parts if p.attempt is attempt and p.node is decode), {})
        if ReqStage.TRANSFERRING not in of_decode:
            return None
        reserved_s = min(of_decode.get(ReqStage.QUEUED, 0.0), queued_s)
        transfer_s = max(0.0, of_decode[ReqStage.TRANSFERRING] - (queued_s - reserved_s) - prefill_s)
    report = attempt.reports.get(node.role, ReqReport())
    # A prompt that was computed ahead of its reservation would have been computed without the wait as well.
    # The last chunk may end behind the reservation, and then kept the request in the queue.
    ahead_s = min(report.ahead_s, queued_s)
    ahead_in_queue_s = min(ahead_s, queued_s - reserved_s)
    waited_s = queued_s - reserved_s - ahead_in_queue_s
    fetch_s = max(0.0, min(report.fetch_s - reserved_s, waited_s))
    sent_after_s = attempt.sent_at - req.started_at
    told_after_s = req.first_token_at - attempt.sent_at
    num_computed = max(0, req.prompt_len - req.cached_tokens)
    num_fetched = report.num_fetched_tokens
    stages = [
        StageTime(StartStage.DISPATCH, "", req.waited_s),
        StageTime(StartStage.FAILOVER, "", sent_after_s),
    ]
    if decode is not None:
        stages.append(
            StageTime(StartStage.RESERVATION, decode.ref.node_id, reserved_s + ahead_in_queue_s - ahead_s)
        )
    if fetch_s:
        in_place_of_s = _prefill_s(node, num_fetched) if num_fetched else 0.0
        stages.append(StageTime(StartStage.FETCH, name, fetch_s, in_place_of_s))
    stages += [
        StageTime(StartStage.QUEUE, name, waited_s - fetch_s),
        StageTime(StartStage.PREFILL, name, prefill_s + ahead_s, _prefill_s(node, num_computed)),
        StageTime(StartStage.DELIVERY, name, max(0.0, told_after_s - queued_s - prefill_s)),
    ]
    if decode is not None:
        expected_s = _transfer_s(decode, req.kv_bytes_transferred)
        between = f"{name} to {decode.ref.node_id}"
        stages.append(StageTime(StartStage.TRANSFER, between, transfer_s, expected_s))
    worst, ttft_s = worst_of(stages), req.waited_s + req.first_token_at - req.started_at
    return Start(ttft_s=ttft_s, slow_because=worst.stage if worst is not None else None, stages=stages)


def _prefill_s(node: Node, num_tokens: int) -> float | None:
    rate = node.load.prefill_tokens_per_s
    return max(num_tokens, SHORT_PROMPT_TOKENS) / rate if rate else None


def _transfer_s(node: Node, nbytes: int) -> float | None:
    rate = node.load.kv_bytes_per_s
    return max(nbytes, SMALL_TRANSFER_NBYTES) / rate if rate else None


# ------------------------------------------------------------------------------------------------- traces
@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stay in a stage, from `began` to `ended`, in seconds of the node's clock."""

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
    parts = stages_of(req)
    decoding: dict[ReqKey, float] = {}
    for part in parts:
        for stamp in part.stamps:
            if part.node.role is Role.DECODE and stamp.stage == ReqStage.DECODING:
                decoding.setdefault(part.attempt.key, stamp.time)
    spans: list[StageSpan] = []
    for part in parts:
        end = req.ended_at + wall_s
        if part.node.role is Role.PREFILL:  # its part ends when the decode node has all pages
            end = decoding.get(part.attempt.key, end)
        ends = [*(stamp.time for stamp in part.stamps[1:]), end]
        spans += [
            StageSpan(part.node, part.attempt.key.attempt, stamp.stage, stamp.time, max(stamp.time, over))
            for stamp, over in zip(part.stamps, ends, strict=True)
            if stamp.stage != ReqStage.FINISHED
        ]
    return spans
