"""The life of one sequence: choose its nodes, send it, put its tokens in order, and end it on every node.

    start ── Prefill ─▶ P ┐                       the node that finishes it, fails it or dies decides how it ends;
       └──── Decode ──▶ D ┴─ Tokens ─▶ on_tokens  every other holder is told: Cancel, or Stop after a stop string

`placement` says who gets what.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from router.dispatch.first_token_queue import FirstTokenQueue
from router.dispatch.metrics import Metrics
from router.dispatch.node_counts import NodeCounts
from router.dispatch.placement import Fleet, Placement, Plan
from router.dispatch.policy import RoutingPolicy
from router.dispatch.running_req import Aborted, Node, RunningReq
from shared.errors import RequestError
from shared.log import event
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Finish,
    Prefill,
    ReqKey,
    Role,
    Stop,
    TokenEntry,
    Work,
)
from shared.timeline import Clock


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long a sequence may wait before it is given up, in seconds."""

    first_token_s: float
    stall_s: float


class Dispatcher:
    """All running sequences of this router."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        incarnation: str,
        prefill_policy: RoutingPolicy,
        decode_policy: RoutingPolicy,
        deadlines: Deadlines,
        local_prefill_tokens: int,
        metrics: Metrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._counts = NodeCounts()
        self._placement = Placement(
            fleet,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            local_prefill_tokens=local_prefill_tokens,
            counts=self._counts,
        )
        self._deadlines = deadlines
        self._metrics = metrics
        self._clock = clock
        self.queue = FirstTokenQueue(clock)
        self._rids = itertools.count(1)
        self._running: dict[str, RunningReq] = {}
        self._works: dict[str, Work] = {}
        """What each running sequence was asked to be, to send it again."""
        self._closed: str | None = None

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    # ------------------------------------------------------------------------------- towards clients
    def start(self, work: Work, wake: Callable[[], None], *, split: bool = False) -> RunningReq:
        """Send a sequence to its nodes. Raises RequestError when none can take it.

        `split` forces the way through both fleets, however short the prompt.
        """
        if self._closed is not None:
            raise RequestError(self._closed, status=503)
        plan = self._plan(work, split=split)
        req = RunningReq(
            ReqKey(self._incarnation, str(next(self._rids))),
            prompt_len=len(work.input_ids),
            max_new_tokens=plan.max_new_tokens,
            nodes=plan.nodes,
            wake=wake,
            now=self._clock(),
        )
        self._running[req.key.rid] = req
        self._works[req.key.rid] = work
        self.queue.join(req.key.rid)
        self._metrics.started(req)
        self._send(req.key, work, plan)
        return req

    def never_sent(self, work: Work, wake: Callable[[], None], message: str) -> RunningReq:
        """A sequence that was aborted before it could be sent."""
        key = ReqKey(self._incarnation, str(next(self._rids)))
        now, length = self._clock(), len(work.input_ids)
        req = RunningReq(key, prompt_len=length, max_new_tokens=0, nodes=(), wake=wake, now=now)
        self._metrics.started(req)
        req.end(now, finish=Aborted(message))
        self._metrics.ended(req)
        return req

    def stop(self, req: RunningReq, position: int) -> None:
        """The router found the end itself: tokens from `position` on are not wanted."""
        self._end(req, tell=Stop(req.key, position))

    def abort(self, req: RunningReq, message: str) -> None:
        """End a sequence with what it has so far."""
        self._end(req, finish=Aborted(message))

    def release(self, req: RunningReq) -> None:
        """Nobody waits for it any more. Does nothing when it has ended."""
        self._end(req, error=RequestError("the client is gone", status=499))

    def close(self, reason: str) -> None:
        """Fail whatever runs and refuse what comes, because the router stops."""
        self._closed = reason
        for req in list(self._running.values()):
            self._end(req, error=RequestError(reason, status=503))

    def seconds_left(self, req: RunningReq) -> float:
        """The deadline for its first, or its next, token passes no earlier than this; at 0 it has passed.

        Tokens that come meanwhile only move it further away, so it is enough to look again then.
        """
        now = self._clock()
        if req.last_token_at is None:
            return min(req.started_at + self._deadlines.first_token_s - now, self._deadlines.stall_s)
        return req.last_token_at + self._deadlines.stall_s - now

    def expire(self, req: RunningReq) -> None:
        """Fail a sequence whose deadline has passed."""
        waiting = ", ".join(node.ref.node_id for node in req.holders)
        if req.last_token_at is None:
            message = f"no token within {self._deadlines.first_token_s:g} s from {waiting}"
        else:
            message = f"no further token within {self._deadlines.stall_s:g} s from {waiting}"
        event("deadline", rid=req.key.rid, nodes=waiting)
        self._end(req, error=RequestError(message, status=408, code="deadline"))

    # --------------------------------------------------------------------------------- from the nodes
    def on_tokens(self, node: Node, entries: Sequence[TokenEntry]) -> None:
        """A step of `node`. What names an ended sequence is dropped: its Cancel or Stop is on the way."""
        now, num_generated = self._clock(), 0
        for entry in entries:
            req = self._running.get(entry.key.rid)
            if req is None or req.key != entry.key or node not in req.nodes:
                continue
            if entry.report is not None:
                req.reports[node.role] = entry.report
            if node.role is Role.DECODE:
                # It has the pages and the record, so its prefill node has let go.
                req.holders = [node]
            if entry.finish is not None:
                req.finished_by = node
            req.arrive_logprobs(entry)
            since = req.last_token_at
            num_new = req.arrive(entry.position, entry.token_ids, entry.finish, now)
            num_generated += num_new
            self._metrics.tokens(req, num_new, since, now)
            if since is None and num_new:
                self.queue.leave(req.key.rid, served=True)
            if req.ended:
                self._tell_and_forget(req, Cancel(req.key))
        self._metrics.generated(num_generated)

    def on_failed(self, node: Node, failed: Failed) -> None:
        """`node` has given a sequence up."""
        req = self._running.get(failed.key.rid)
        if req is None or req.key != failed.key or node not in req.holders:
            return
        req.holders.remove(node)
        status = failed.status if 400 <= failed.status < 600 else 500
        self._end(req, error=RequestError(failed.message, status=status, param=failed.param))

    def on_not_cached(self, node: Node, key: ReqKey) -> None:
        """`node` has lost the prefix for which it was chosen: the sequence takes the way through both fleets."""
        req = self._running.get(key.rid)
        if req is None or req.key != key or node not in req.holders:
            return
        work = self._works[key.rid]
        try:
            plan = self._plan(work, split=True)
        except RequestError as error:
            req.holders.remove(node)
            self._end(req, error=error)
            return
        self._leave_decode(req)
        req.try_again(plan.nodes, plan.max_new_tokens)
        self._metrics.failed_over()
        event("not_cached", rid=key.rid, node=node.ref.node_id)
        self._send(req.key, work, plan)

    def on_node_lost(self, node: Node, reason: str) -> None:
        """The connection to `node` is over; what it held is lost."""
        for req in list(self._running.values()):
            if node in req.holders:
                req.holders.remove(node)
                message = f"{node.role} node {node.ref.node_id} was lost: {reason}"
                self._end(req, error=RequestError(message, status=503, code="node_lost"))
        self._counts.lost(node)

    # --------------------------------------------------------------------- towards who removes a node
    def num_held(self, node: Node) -> int:
        """Sequences that `node` has a part in."""
        return sum(node in req.holders for req in self._running.values())

    def give_up(self, node: Node, reason: str) -> int:
        """Fail what `node` has a part in, and tell it so; how many those were."""
        held = [req for req in self._running.values() if node in req.holders]
        for req in held:
            message = f"{node.role} node {node.ref.node_id} was removed: {reason}"
            self._end(req, error=RequestError(message, status=503, code="node_removed"))
        return len(held)

    # ------------------------------------------------------------------------------------------ inside
    def _plan(self, work: Work, *, split: bool) -> Plan:
        judged, num_input_ids = work.params.logprobs, len(work.input_ids)
        return self._placement.plan(
            work.input_ids,
            work.params.max_new_tokens,
            work.extra_key,
            num_matchable=judged.num_matchable(num_input_ids) if judged else num_input_ids - 1,
            split=split,
        )

    def _send(self, key: ReqKey, work: Work, plan: Plan) -> None:
        params = msgspec.structs.replace(
            work.params,
            max_new_tokens=plan.max_new_tokens,
            min_new_tokens=min(work.params.min_new_tokens, plan.max_new_tokens),
        )
        work = msgspec.structs.replace(work, params=params)
        if plan.decode is not None:
            source = plan.prefill.ref if plan.prefill else None
            self._counts.sent(plan.decode)
            plan.decode.send(Decode(key, work, source, plan.local_prefill_limit))
        if plan.prefill is not None:
            target = plan.decode.ref if plan.decode else None
            plan.prefill.send(Prefill(key, work, target))

    def _end(
        self,
        req: RunningReq,
        *,
        finish: Aborted | None = None,
        error: RequestError | None = None,
        tell: Cancel | Stop | None = None,
    ) -> None:
        if req.ended:
            return
        req.end(self._clock(), finish=finish, error=error)
        self._tell_and_forget(req, tell or Cancel(req.key))

    def _tell_and_forget(self, req: RunningReq, message: Cancel | Stop) -> None:
        for node in req.holders:
            if node is not req.finished_by:
                node.send(message)
        req.holders = []
        self._leave_decode(req)
        del self._running[req.key.rid], self._works[req.key.rid]
        self.queue.leave(req.key.rid, served=isinstance(req.finish, Finish))
        self._metrics.ended(req)

    def _leave_decode(self, req: RunningReq) -> None:
        for node in req.nodes:
            if node.role is Role.DECODE:
                self._counts.ended(node)
