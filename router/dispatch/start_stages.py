"""What the time to the first token of a sequence went to, and which stage made a slow one slow.

    dispatch       until the router had nodes for it                           should cost: no time
    turn           until it was its turn among the API keys, if several        no time
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

Durations come from the stamps of one node each, since the clocks of two hosts are never compared. Both nodes hear of
the sequence at the same time. Of the time that the prefill node kept it queued, the decode node's share is therefore
the reservation, what a fetch took beyond that is the fetch, and the rest is the queue. What is left of the transfer
stage behind fetch, queue and prefill is the transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from shared.protocol.messages import ReqReport, Role
from shared.timeline import ReqStage, Stamp

if TYPE_CHECKING:
    from router.dispatch.running_req import Attempt, Node, RunningReq

MIN_EXCESS_S = 0.05
"""A shorter excess makes nothing slow: turns of a scheduler and messages differ by milliseconds."""
MIN_EXCESS_SHARE = 0.5
"""Nor does an excess of less than this share of the stage's time: it took less than twice what it should."""
SHORT_PROMPT_TOKENS, SMALL_TRANSFER_NBYTES = 64, 1 << 20
"""Work of less takes as long as work of so much. Nodes measure their rates by larger work."""


class StartStage(StrEnum):
    """A stage of a sequence up to its second token, in this order."""

    DISPATCH = "dispatch"
    TURN = "turn"
    FAILOVER = "failover"
    RESERVATION = "reservation"
    FETCH = "fetch"
    QUEUE = "queue"
    PREFILL = "prefill"
    DELIVERY = "delivery"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class StageTime:
    """How long one stage took, and what it should cost; None: no rate of the node is known."""

    stage: StartStage
    nodes: tuple[Node, ...]
    seconds: float
    expected_s: float | None = 0.0

    @property
    def excess_s(self) -> float:
        """Seconds beyond what it should cost; 0 when that is unknown."""
        return 0.0 if self.expected_s is None else max(0.0, self.seconds - self.expected_s)

    @property
    def node_names(self) -> str:
        """The ids of its nodes, `prefill-0 to decode-0` for a transfer; empty for a stage of the router."""
        return " to ".join(node.ref.node_id for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Start:
    """The time to the first token, by stage. The transfer, which delays the second one, is behind it."""

    ttft_s: float
    stages: tuple[StageTime, ...]

    @property
    def worst(self) -> StageTime | None:
        """Of the stages that were slow, the one with the largest excess; None if no stage was."""
        slow = [s for s in self.stages if s.excess_s >= max(MIN_EXCESS_S, MIN_EXCESS_SHARE * s.seconds)]
        return max(slow, key=lambda stage: stage.excess_s, default=None)

    @property
    def slow_because(self) -> StartStage | None:
        """The stage of `worst`; None for a start that was not slow."""
        return self.worst.stage if self.worst is not None else None


def measure_start(req: RunningReq) -> Start | None:
    """How a sequence started; None until the nodes have reported every stage of it."""
    found = _first_prefilled(req)
    if found is None or req.first_token_at is None:
        return None
    attempt, role, of = found
    node = next(node for node in attempt.nodes if node.role is role)
    decode = next((n for n in attempt.nodes if n.role is Role.DECODE and n is not node), None)
    queued_s, prefill_s = of[role].get(ReqStage.QUEUED, 0.0), of[role][ReqStage.PREFILLING]
    reserved_s = transfer_s = 0.0
    if decode is not None:
        if ReqStage.TRANSFERRING not in of[Role.DECODE]:
            return None
        reserved_s = min(of[Role.DECODE].get(ReqStage.QUEUED, 0.0), queued_s)
        transfer_s = max(0.0, of[Role.DECODE][ReqStage.TRANSFERRING] - (queued_s - reserved_s) - prefill_s)
    report = attempt.reports.get(role, ReqReport())
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
    stages = [StageTime(StartStage.DISPATCH, (), req.waited_s)]
    if req.turn_s:
        stages.append(StageTime(StartStage.TURN, (), req.turn_s))
    stages.append(StageTime(StartStage.FAILOVER, (), sent_after_s - req.turn_s))
    if decode is not None:
        stages.append(StageTime(StartStage.RESERVATION, (decode,), reserved_s + ahead_in_queue_s - ahead_s))
    if fetch_s:
        in_place_of_s = _prefill_s(node, num_fetched) if num_fetched else 0.0
        stages.append(StageTime(StartStage.FETCH, (node,), fetch_s, in_place_of_s))
    stages += [
        StageTime(StartStage.QUEUE, (node,), waited_s - fetch_s),
        StageTime(StartStage.PREFILL, (node,), prefill_s + ahead_s, _prefill_s(node, num_computed)),
        StageTime(StartStage.DELIVERY, (node,), max(0.0, told_after_s - queued_s - prefill_s)),
    ]
    if decode is not None:
        expected_s = _transfer_s(decode, req.kv_bytes_transferred)
        stages.append(StageTime(StartStage.TRANSFER, (node, decode), transfer_s, expected_s))
    return Start(req.waited_s + req.first_token_at - req.started_at, tuple(stages))


def _prefill_s(node: Node, num_tokens: int) -> float | None:
    rate = node.load.prefill_tokens_per_s
    return max(num_tokens, SHORT_PROMPT_TOKENS) / rate if rate else None


def _transfer_s(node: Node, nbytes: int) -> float | None:
    rate = node.load.kv_bytes_per_s
    return max(nbytes, SMALL_TRANSFER_NBYTES) / rate if rate else None


_Durations = dict[Role, dict[str, float]]


def _first_prefilled(req: RunningReq) -> tuple[Attempt, Role, _Durations] | None:
    """The first attempt whose prompt was computed, the role that did it, and how long each role was in each stage."""
    for attempt in req.attempts:
        stamps = dict.fromkeys(stamp for report in attempt.reports.values() for stamp in report.stamps)
        of = {role: _first_stays([stamp for stamp in stamps if stamp.role == role]) for role in Role}
        roles = {node.role for node in attempt.nodes}
        for role in (Role.PREFILL, Role.DECODE):
            if role in roles and ReqStage.PREFILLING in of[role]:
                return attempt, role, of
    return None


def _first_stays(stamps: Sequence[Stamp]) -> dict[str, float]:
    """Seconds of the first stay in each stage that was left. Stamps of one node, in order."""
    stays: dict[str, float] = {}
    for entered, left in itertools.pairwise(stamps):
        stays.setdefault(entered.stage, max(0.0, left.time - entered.time))
    return stays
