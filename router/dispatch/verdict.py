"""What the time to the first token of a sequence went to, and the verdict on one that was slow.

    dispatch       until the router had nodes for it                           expected: no time
    turn           until it was its turn among the API keys, if several        expected: no time
    failover       attempts that lost their nodes                              expected: no time
    reservation    until the decode node had pages and a row for it            expected: no time
                   (without the time in which the prompt was computed ahead)
    fetch          until cached pages had come from another node               expected: the usual of that node;
                   or would come no more                                                 no time
    queue          until the node that prefills began with it                  expected: no time
    prefill        while its prompt was computed, ahead of that or behind it   expected: the usual of that node
    delivery       the rest: messages, the loops of nodes and router           expected: the usual of that node
    (first token)
    transfer       until the decode node had all its pages and went on         expected: the usual of that link

Durations come from the stamps of one node each, since the clocks of two hosts are never compared. Both nodes hear of
the sequence at the same time. Of the time that the prefill node kept it queued, the decode node's share is therefore
the reservation, what a fetch took beyond that is the fetch, and the rest is the queue. What is left of the transfer
stage behind fetch, queue and prefill is the transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from router.dispatch.usual import UsualDurations
from shared.protocol.messages import Load, ReqReport, Role, WaitedFor
from shared.timeline import ReqStage, Stamp

if TYPE_CHECKING:
    from router.dispatch.running_req import Attempt, Node, RunningReq

MIN_EXCESS_S = 0.05
"""A shorter excess is no verdict. Turns of a scheduler and messages differ by milliseconds, and a person does not
notice a tenth of a second."""
MIN_EXCESS_SHARE = 0.5
"""Nor is an excess of less than this share of the time: the request took less than twice as long as expected."""
MIN_CAUSE_SHARE = 0.1
"""A stage with less than this share of the excess before the first token is not named."""


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


_LEARNED = (StartStage.FETCH, StartStage.PREFILL, StartStage.DELIVERY, StartStage.TRANSFER)


@dataclass(frozen=True, slots=True)
class StageTime:
    """How long one stage took, and how long it usually takes; None: this router has seen too little such work."""

    stage: StartStage
    nodes: tuple[Node, ...]
    seconds: float
    work: int
    """Tokens that came in FETCH, tokens computed in PREFILL, bytes moved in TRANSFER; else 0."""
    usual_s: float | None
    because: str = ""
    """The cause of a wait, as a clause that follows the node's name; of RESERVATION, what it waited for and why.
    Computed from what the nodes have told."""

    @property
    def excess_s(self) -> float:
        """Seconds beyond the usual; 0 when that is unknown."""
        return 0.0 if self.usual_s is None else max(0.0, self.seconds - self.usual_s)

    @property
    def node_names(self) -> str:
        """The ids of its nodes, `prefill-0 to decode-0` for a transfer; empty for a stage of the router."""
        return " to ".join(node.ref.node_id for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a start was slow: `causes` by their excess, the largest first, and the time without the excess of those.

    With only a transfer among the causes, `without_s` is the time to the first token itself.
    """

    causes: tuple[StageTime, ...]
    without_s: float
    text: str

    @property
    def excess_s(self) -> float:
        """Seconds that the causes took beyond the usual."""
        return sum(cause.excess_s for cause in self.causes)


@dataclass(frozen=True, slots=True)
class Start:
    """The time to the first token, by stage. The transfer, which delays the second one, is behind it."""

    ttft_s: float
    stages: tuple[StageTime, ...]

    @property
    def usual_s(self) -> float | None:
        """The expected time to the first token on free nodes; None while the usual of a stage is unknown."""
        parts = [stage.usual_s for stage in self._before_token]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def verdict(self) -> Verdict | None:
        """Why it was slow; None if it was not, or if the usual of the stages that took the time is unknown."""
        before = self._before_token
        excess_s = sum(stage.excess_s for stage in before)
        causes = [s for s in self.stages if s not in before and _is_slow(s.seconds, s.excess_s)]
        if _is_slow(self.ttft_s, excess_s):
            causes += [stage for stage in before if stage.excess_s >= MIN_CAUSE_SHARE * excess_s]
        if not causes:
            return None
        causes.sort(key=lambda stage: -stage.excess_s)
        without_s = max(0.0, self.ttft_s - sum(s.excess_s for s in causes if s in before))
        return Verdict(tuple(causes), without_s, _in_words(causes, without_s))

    @property
    def _before_token(self) -> Sequence[StageTime]:
        return [stage for stage in self.stages if stage.stage is not StartStage.TRANSFER]


def worst_of(starts: Mapping[str, Start]) -> tuple[str | None, Verdict | None]:
    """The verdict on the sequence that lost most time, with its rid; no rid and none if none was slow."""
    slow = [(rid, verdict) for rid, start in starts.items() if (verdict := start.verdict) is not None]
    return max(slow, key=lambda one: one[1].excess_s, default=(None, None))


class Starts:
    """Measures how sequences start, and learns from each what is usual."""

    def __init__(self) -> None:
        self._usual = UsualDurations()

    def measure(self, req: RunningReq, now: float) -> Start | None:
        """The start of a sequence; None until the nodes have reported every stage of it. It is measured once."""
        stages = _stages(req, self._usual_s)
        if not stages:
            return None
        for stage in stages:
            if _is_learned(stage.stage, stage.work):
                self._usual.observe(_place(stage.stage, stage.nodes), stage.work, stage.seconds, now)
        assert req.first_token_at is not None
        return Start(req.waited_s + req.first_token_at - req.started_at, tuple(stages))

    def forget(self, node: Node) -> None:
        """Drop what is known of a node that is gone."""
        self._usual.forget(node.ref.incarnation)

    def _usual_s(self, stage: StartStage, nodes: tuple[Node, ...], work: int) -> float | None:
        return self._usual.usual_s(_place(stage, nodes), work) if _is_learned(stage, work) else 0.0


def _is_learned(stage: StartStage, work: int) -> bool:
    """Whether the stage takes its usual time. A fetch that was in vain should have taken none."""
    return stage in _LEARNED and (work > 0 or stage is not StartStage.FETCH)


def _place(stage: StartStage, nodes: tuple[Node, ...]) -> tuple[str, ...]:
    return (stage, *(node.ref.incarnation for node in nodes))


# ---------------------------------------------------------------------------------------------- measuring
def _stages(
    req: RunningReq, usual_s: Callable[[StartStage, tuple[Node, ...], int], float | None]
) -> list[StageTime]:
    """Every stage of the attempt that brought the first token; empty while one of them is not known."""
    found = _first_prefilled(req)
    if found is None or req.first_token_at is None:
        return []
    attempt, role, of = found
    node = next(node for node in attempt.nodes if node.role is role)
    decode = next((n for n in attempt.nodes if n.role is Role.DECODE and n is not node), None)
    queued_s, prefill_s = of[role].get(ReqStage.QUEUED, 0.0), of[role][ReqStage.PREFILLING]
    reserved_s = transfer_s = 0.0
    if decode is not None:
        if ReqStage.TRANSFERRING not in of[Role.DECODE]:
            return []
        reserved_s = min(of[Role.DECODE].get(ReqStage.QUEUED, 0.0), queued_s)
        transfer_s = max(0.0, of[Role.DECODE][ReqStage.TRANSFERRING] - (queued_s - reserved_s) - prefill_s)
    report = attempt.reports.get(role, ReqReport())
    # A prompt that was computed ahead of its reservation would have been computed without the wait as well.
    # The last chunk may end behind the reservation, and then kept the request in the queue.
    ahead_s = min(report.ahead_s, queued_s)
    ahead_in_queue_s = min(ahead_s, queued_s - reserved_s)
    waited_s = queued_s - reserved_s - ahead_in_queue_s
    fetch_s, fetched = max(0.0, min(report.fetch_s - reserved_s, waited_s)), report.num_fetched_tokens
    num_computed = max(0, req.prompt_len - req.cached_tokens)
    sent_after_s = attempt.sent_at - req.started_at
    told_after_s = req.first_token_at - attempt.sent_at
    both = (node, decode) if decode is not None else (node,)
    measured: list[tuple[StartStage, tuple[Node, ...], float, int, str]] = [
        (StartStage.DISPATCH, (), req.waited_s, 0, ""),
        (StartStage.FAILOVER, (), sent_after_s - req.turn_s, 0, _why_failed_over(req)),
        (StartStage.QUEUE, (node,), waited_s - fetch_s, 0, _why_queued(node, attempt)),
        (StartStage.PREFILL, (node,), prefill_s + ahead_s, num_computed, ""),
        (StartStage.DELIVERY, (node,), max(0.0, told_after_s - queued_s - prefill_s), 0, ""),
    ]
    if fetch_s:
        measured.insert(2, (StartStage.FETCH, (node,), fetch_s, fetched, "" if fetched else "in vain"))
    if decode is not None:
        why = _why_not_reserved(req, decode, attempt)
        measured.insert(
            2, (StartStage.RESERVATION, (decode,), reserved_s + ahead_in_queue_s - ahead_s, 0, why)
        )
        measured.append((StartStage.TRANSFER, both, transfer_s, req.kv_bytes_transferred, ""))
    if req.turn_s:
        measured.insert(1, (StartStage.TURN, (), req.turn_s, 0, ""))
    return [
        StageTime(stage, nodes, seconds, work, usual_s(stage, nodes, work), why)
        for stage, nodes, seconds, work, why in measured
    ]


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


def _why_failed_over(req: RunningReq) -> str:
    return f"since {req.failover.error.message}" if req.failover.error is not None else ""


def _why_queued(node: Node, attempt: Attempt) -> str:
    loads = (attempt.loads.get(node.role, node.load), node.load)
    if num_tokens := max(load.num_queued_tokens for load in loads):
        return f"where {_count(num_tokens, 'prompt token')} were to be computed"
    num_reqs = max(load.num_waiting + load.num_running for load in loads)
    return f"where {_count(num_reqs, 'request')} waited or ran" if num_reqs else ""


def _why_not_reserved(req: RunningReq, decode: Node, attempt: Attempt) -> str:
    loads = (attempt.loads.get(Role.DECODE, decode.load), decode.load)
    load = min(loads, key=_free_pages)
    report = attempt.reports.get(Role.DECODE)
    waited_for = report.waited_for if report is not None else ""
    name = decode.ref.node_id
    if waited_for == WaitedFor.ROWS:
        return (
            f"a place on {name}, which runs {_count(decode.limits.max_running_requests, 'request')} at most"
        )
    if waited_for == WaitedFor.PAGES:
        free, needed = _free_pages(load), -(-req.prompt_len // decode.page_size)
        seen = f" ({free:,} of {load.num_pages:,} pages were free for a prompt of {needed:,})"
        return f"pages on {name}, which is full{seen if free < needed and load.num_pages else ''}"
    if waited_for == WaitedFor.ORDER:
        return f"pages on {name}, behind requests that had given up their pages"
    return f"{name} to take it" + (" and compile its grammar" if req.work.params.grammar is not None else "")


def _free_pages(load: Load) -> int:
    return load.num_free_pages + load.num_evictable_pages


# ------------------------------------------------------------------------------------------------ wording
_WAITS = {
    StartStage.DISPATCH: ("waiting for nodes that could take it", "with nodes at once"),
    StartStage.TURN: ("waiting for its turn among the API keys", "without other keys"),
    StartStage.FAILOVER: ("lost with an attempt that failed", "without the failover"),
    StartStage.RESERVATION: ("waiting for", "with a free decode node"),
    StartStage.FETCH: ("waiting for pages that another node was to lend to {}", "without that"),
    StartStage.QUEUE: ("waiting in the queue of {}", "with a free {}"),
    StartStage.DELIVERY: ("between {} and this router, in no stage of the node", "with usual delivery"),
}


def _is_slow(seconds: float, excess_s: float) -> bool:
    return excess_s >= MIN_EXCESS_S and excess_s >= MIN_EXCESS_SHARE * seconds


def _in_words(causes: Sequence[StageTime], without_s: float) -> str:
    before = [cause for cause in causes if cause.stage is not StartStage.TRANSFER]
    parts = [_cause_in_words(cause) for cause in causes]
    text = " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if len(before) == 1:
        text += f"; {_otherwise(before[0])} {duration(without_s)}"
    elif before:
        text += f"; without {'both' if len(before) == 2 else 'these'} {duration(without_s)}"
    return text


def _cause_in_words(cause: StageTime) -> str:
    names, usual_s = cause.node_names, cause.usual_s
    assert usual_s is not None, "a stage whose usual is unknown has no excess"
    if cause.stage is StartStage.PREFILL:
        rate, usual_rate = (cause.work / s if s else 0.0 for s in (cause.seconds, usual_s))
        return (
            f"{duration(cause.seconds)} computing {_count(cause.work, 'token')} on {names}, "
            f"at {rate:,.0f} tokens/s where {usual_rate:,.0f} are usual"
        )
    if cause.stage is StartStage.TRANSFER:
        return (
            f"{duration(cause.seconds)} between the first token and the second for {cause.work / 1e6:,.1f} MB of KV "
            f"from {names}{_transport(cause)}, where {duration(usual_s)} is usual"
        )
    text = f"{duration(cause.seconds)} {_WAITS[cause.stage][0].format(names)}"
    if cause.stage is StartStage.RESERVATION:
        return f"{text} {cause.because}"
    if usual_s:
        text += f", where {duration(usual_s)} is usual"
    return f"{text}, {cause.because}" if cause.because else text


def _otherwise(cause: StageTime) -> str:
    if cause.stage is StartStage.PREFILL:
        return f"at the usual speed of {cause.node_names}"
    return _WAITS[cause.stage][1].format(cause.node_names)


def _transport(cause: StageTime) -> str:
    """Which link the pages took, as the receiver's latest Pong tells it."""
    source, target = cause.nodes
    for link in target.load.links:
        if link.incoming and link.peer == source.ref.incarnation:
            measured = f" (rehearsed at {link.gb_s:.2g} GB/s)" if link.gb_s else ""
            return f" over {link.transport}{measured}"
    return ""


def duration(seconds: float) -> str:
    """A duration for people: `212 ms`, `1.20 s`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
