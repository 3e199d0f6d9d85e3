"""Dispatches sequences: sends each to the nodes that `placement` chooses, takes its tokens, and ends it on all nodes.

start ── Prefill ─▶ P ┐                       a node that finishes the sequence, fails it or dies ends it;
   └──── Decode ──▶ D ┴─ Tokens ─▶ on_tokens  every other holder gets Cancel, or Stop after a stop string
                      └─ NotCached ─▶ _send_again: the next attempt, behind the tokens that have arrived
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from router.dispatch.first_token_queue import FirstTokenQueue
from router.dispatch.metrics import Metrics
from router.dispatch.node_counts import NodeCounts
from router.dispatch.placement import Fleet, Placement, Route
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
    """How many seconds a sequence may wait for its first token and for its next before it fails."""

    first_token_s: float
    stall_s: float


class Dispatcher:
    """All running sequences of this router."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        incarnation: str,
        policies: Mapping[Role, RoutingPolicy],
        deadlines: Deadlines,
        local_prefill_tokens: int,
        metrics: Metrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._counts = NodeCounts()
        self._placement = Placement(
            fleet,
            policies=policies,
            local_prefill_tokens=local_prefill_tokens,
            counts=self._counts,
        )
        self._deadlines = deadlines
        self._metrics = metrics
        self._clock = clock
        self.queue = FirstTokenQueue(clock)
        self._rids = itertools.count(1)
        self._running: dict[str, RunningReq] = {}
        self._closed: str | None = None

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    # ------------------------------------------------------------------------------- towards clients
    def start(self, work: Work, wake: Callable[[], None], *, split: bool = False) -> RunningReq:
        """Send a sequence to its nodes. Raises RequestError when none can take it.

        With `split` the sequence goes through both fleets, however short the prompt.
        """
        if self._closed is not None:
            raise RequestError(self._closed, status=503)
        route = self._placement.route(work, split=split)
        work = _clipped(work, route.max_new_tokens)
        req = RunningReq(self._next_key(), work, wake=wake, now=self._clock())
        self._running[req.key.rid] = req
        self.queue.join(req.key.rid)
        self._metrics.started(req)
        self._send(req, work, route)
        return req

    def abort_unsent(self, work: Work, wake: Callable[[], None], message: str) -> RunningReq:
        """The ended record of a sequence that was aborted before it was sent."""
        now = self._clock()
        req = RunningReq(self._next_key(), work, wake=wake, now=now)
        self._metrics.started(req)
        req.end(now, finish=Aborted(message))
        self._metrics.ended(req)
        return req

    def stop(self, req: RunningReq, position: int) -> None:
        """End a sequence whose text has a stop: tokens from `position` on are not wanted."""
        self._end(req, message=Stop(req.key, position))

    def abort(self, req: RunningReq, message: str) -> None:
        """End a sequence with what it has so far."""
        self._end(req, finish=Aborted(message))

    def release(self, req: RunningReq) -> None:
        """End a sequence whose client is gone. A sequence that has ended stays as it is."""
        self._end(req, error=RequestError("the client is gone", status=499))

    def close(self, reason: str) -> None:
        """Fail every running sequence and refuse new ones, because the router stops."""
        self._closed = reason
        for req in list(self._running.values()):
            self._end(req, error=RequestError(reason, status=503))

    def seconds_left(self, req: RunningReq) -> float:
        """The seconds until the deadline of the first or next token; at 0 it has passed.

        A token moves the deadline further away, so a caller may wait so long before it asks again.
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
        """Take the tokens of one step of `node`. Tokens of ended sequences are dropped."""
        now, num_generated = self._clock(), 0
        for entry in entries:
            req = self._running.get(entry.key.rid)
            if req is None or req.key != entry.key or node not in req.nodes:
                continue
            if entry.report is not None:
                req.reports[node.role] = entry.report
            if node.role is Role.DECODE:
                # The decode node has the pages and the Handoff, so the prefill node holds nothing any more.
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
                self._forget(req, Cancel(req.key))
        self._metrics.generated(num_generated)

    def on_failed(self, node: Node, failed: Failed) -> None:
        """Fail a sequence that `node` has failed."""
        req = self._running.get(failed.key.rid)
        if req is None or req.key != failed.key or node not in req.holders:
            return
        req.holders.remove(node)
        status = failed.status if 400 <= failed.status < 600 else 500
        self._end(req, error=RequestError(failed.message, status=status, param=failed.param))

    def on_not_cached(self, node: Node, key: ReqKey) -> None:
        """Send a sequence through both fleets, since `node` has evicted the prefix for which it was chosen."""
        req = self._running.get(key.rid)
        if req is None or req.key != key or node not in req.holders:
            return
        req.holders.remove(node)
        event("not_cached", rid=key.rid, node=node.ref.node_id)
        self._send_again(req, split=True)

    def on_node_lost(self, node: Node, reason: str) -> None:
        """Fail the sequences that `node` held, since the connection to it is lost."""
        for req in list(self._running.values()):
            if node in req.holders:
                req.holders.remove(node)
                message = f"{node.role} node {node.ref.node_id} was lost: {reason}"
                self._end(req, error=RequestError(message, status=503, code="node_lost"))
        self._counts.lost(node)

    # ---------------------------------------------------------------------------- removing a node
    def num_held(self, node: Node) -> int:
        """The number of sequences that `node` holds."""
        return sum(node in req.holders for req in self._running.values())

    def fail_held(self, node: Node, reason: str) -> int:
        """Fail the sequences that `node` holds and cancel them there; returns their number."""
        held = [req for req in self._running.values() if node in req.holders]
        for req in held:
            message = f"{node.role} node {node.ref.node_id} was removed: {reason}"
            self._end(req, error=RequestError(message, status=503, code="node_removed"))
        return len(held)

    # ------------------------------------------------------------------------------------------ inside
    def _next_key(self) -> ReqKey:
        return ReqKey(self._incarnation, str(next(self._rids)))

    def _send(self, req: RunningReq, work: Work, route: Route) -> None:
        req.begin(route.nodes)
        if route.decode is not None:
            source = route.prefill.ref if route.prefill else None
            self._counts.sent(route.decode)
            route.decode.send(Decode(req.key, work, source, route.local_prefill_limit))
        if route.prefill is not None:
            target = route.decode.ref if route.decode else None
            route.prefill.send(Prefill(req.key, work, target))

    def _send_again(self, req: RunningReq, *, split: bool = False) -> None:
        """Send the next attempt of a sequence to newly chosen nodes. The sequence fails if there are none.

        The caller has taken nodes that hold nothing of the sequence any more out of `req.holders`.
        """
        work = req.remaining_work
        try:
            route = self._placement.route(work, split=split, again=True)
        except RequestError as error:
            self._end(req, error=error)
            return
        self._leave_nodes(req, Cancel(req.key))
        req.next_attempt()
        self._metrics.failed_over()
        self._send(req, work, route)

    def _end(
        self,
        req: RunningReq,
        *,
        finish: Aborted | None = None,
        error: RequestError | None = None,
        message: Cancel | Stop | None = None,
    ) -> None:
        if req.ended:
            return
        req.end(self._clock(), finish=finish, error=error)
        self._forget(req, message or Cancel(req.key))

    def _forget(self, req: RunningReq, message: Cancel | Stop) -> None:
        self._leave_nodes(req, message)
        del self._running[req.key.rid]
        self.queue.leave(req.key.rid, served=isinstance(req.finish, Finish))
        self._metrics.ended(req)

    def _leave_nodes(self, req: RunningReq, message: Cancel | Stop) -> None:
        """Take the latest attempt from its nodes. Holders get `message`, but for the node that finished."""
        for node in req.holders:
            if node is not req.finished_by:
                node.send(message)
        for node in req.nodes:
            if node.role is Role.DECODE:
                self._counts.ended(node)
        req.holders = []


def _clipped(work: Work, max_new_tokens: int) -> Work:
    """The work with at most `max_new_tokens`."""
    least = min(work.params.min_new_tokens, max_new_tokens)
    params = msgspec.structs.replace(work.params, max_new_tokens=max_new_tokens, min_new_tokens=least)
    return msgspec.structs.replace(work, params=params)
