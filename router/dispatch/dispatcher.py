"""Dispatches sequences: sends each to the nodes that `placement` chooses, takes its tokens, and ends it on all nodes.

start ── Prefill ─▶ P ┐                       a node that finishes the sequence, or refuses it, ends it;
   └──── Decode ──▶ D ┴─ Tokens ─▶ on_tokens  every other holder gets Cancel, or Stop after a stop string
                      └─ NotCached, Failed, a lost node ─▶ _fail_over: the next attempt, behind the tokens that came
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import msgspec

from router.config import DispatchOptions
from router.dispatch.fleet_view import Fleet, FleetView, WaitingQueue, retry_after_s
from router.dispatch.metrics import Metrics
from router.dispatch.moves import Moves
from router.dispatch.node import Loss, Node, Numerics, believed
from router.dispatch.placement import POLICIES, Placement, Route
from router.dispatch.running_req import (
    MAX_FAILURES,
    TRIAL_TOKENS,
    Aborted,
    Attempt,
    Cause,
    RunningReq,
    why_wrong,
)
from router.dispatch.stages import measure_start
from shared.errors import RequestError
from shared.log import LimitedWarning, event
from shared.protocol.messages import (
    CacheEvents,
    CacheResync,
    Cancel,
    Decode,
    Failed,
    Lend,
    Moved,
    MoveWanted,
    NodeToRouter,
    NotCached,
    Prefill,
    ReqKey,
    Role,
    RunsAlone,
    Source,
    Stop,
    TokenEntry,
    Tokens,
    Work,
)
from shared.timeline import Clock

_MOVES_AT_ONCE = 8
"""So many sequences leave a drained node at the same time."""

_VERDICT_S = 3.0
"""How long a node that seems to have crashed may take to show that only its connection was lost, and a crash that a
peer has noticed to be seen here."""

_RETRY_S = 0.2
"""How often a sequence without nodes looks for some."""


class Dispatcher:
    """All running sequences of this router. `later` calls a function after so many seconds (`loop.call_later`).

    `vocab_size` returns the number of token ids of the model, which is known once there are sequences.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        incarnation: str,
        options: DispatchOptions,
        metrics: Metrics,
        vocab_size: Callable[[], int],
        later: Callable[[float, Callable[[], None]], object],
        clock: Clock = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._view = FleetView(fleet, clock)
        self._suspicion = self._view.suspicion
        self._placement = Placement(
            self._view,
            policies={
                Role.PREFILL: POLICIES[options.prefill_policy],
                Role.DECODE: POLICIES[options.decode_policy],
            },
            local_prefill_tokens=options.local_prefill_tokens,
            random=Random(incarnation),
        )
        self._moves = Moves(self._placement, self._view, metrics, clock)
        self._options = options
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._wrong_answer = LimitedWarning("wrong_answer", clock)
        self._later = later
        self._clock = clock
        self.queue = WaitingQueue(clock)
        self._rids = itertools.count(1)
        self._running: dict[str, RunningReq] = {}
        self._closed: str | None = None

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    # ------------------------------------------------------------------------------- towards clients
    def start(
        self,
        work: Work,
        wake: Callable[[], None],
        *,
        split: bool = False,
        in_time: bool = False,
        rid: str = "",
        waited_s: float = 0.0,
    ) -> RunningReq:
        """Send a sequence to its nodes. Raises RequestError when none can take it.

        `rid` is the client's name of its request. With `split` the sequence goes through both fleets, however short
        the prompt. With `in_time` it is refused if its first token would come after `ttft_limit_s`. It has waited
        for nodes for `waited_s`.
        """
        if self._closed is not None:
            raise RequestError(self._closed, status=503)
        route = self._placement.route(work, split=split)
        if in_time:
            self._refuse_late(route)
        work = _clipped(work, route.max_new_tokens, rid)
        now = self._clock()
        req = RunningReq(self._next_key(), work, wake=wake, now=now, rid=rid, waited_s=waited_s)
        self._running[req.key.rid] = req
        self.queue.join(req.key.rid)
        self._metrics.started()
        self._send(req, work, route)
        return req

    def abort_unsent(self, work: Work, wake: Callable[[], None], message: str) -> RunningReq:
        """The ended record of a sequence that was aborted before it was sent."""
        now = self._clock()
        req = RunningReq(self._next_key(), work, wake=wake, now=now)
        self._metrics.started()
        req.end(now, finish=Aborted(message))
        self._metrics.ended(req)
        return req

    def stop(self, req: RunningReq, position: int) -> None:
        """End a sequence whose text has a stop: tokens from `position` on are not wanted."""
        for node in req.attempt.holders:
            self._suspicion.served(node)
        self._end(req, message=Stop(req.key, position))

    def abort(self, req: RunningReq, message: str) -> None:
        """End a sequence with what it has so far."""
        self._end(req, finish=Aborted(message))

    def release(self, req: RunningReq) -> None:
        """End a sequence whose client is gone. A sequence that has ended stays as it is."""
        self._end(req, error=RequestError("the client is gone", status=499))

    def refuse(self, reason: str) -> None:
        """Refuse new sequences from now on, because the router stops. Those that run go on."""
        self._closed = reason

    def close(self, reason: str) -> None:
        """Fail every running sequence and refuse new ones."""
        self.refuse(reason)
        for req in list(self._running.values()):
            self._end(req, error=RequestError(reason, status=503))

    def seconds_left(self, req: RunningReq) -> float:
        """The seconds until the deadline of the first or next token; at 0 it has passed.

        A token moves the deadline further away, so a caller may wait so long before it asks again.
        """
        now = self._clock()
        if req.last_token_at is None:
            return min(req.started_at + self._options.queue_timeout_s - now, self._options.stall_timeout_s)
        return req.last_token_at + self._options.stall_timeout_s - now

    def expire(self, req: RunningReq) -> None:
        """Fail a sequence whose deadline has passed."""
        waiting = ", ".join(node.ref.node_id for node in req.attempt.holders) or "any node"
        if req.last_token_at is None:
            message = f"no token within {self._options.queue_timeout_s:g} s from {waiting}"
        else:
            message = f"no further token within {self._options.stall_timeout_s:g} s from {waiting}"
            for node in req.attempt.holders:
                if node.role is Role.DECODE:  # a prefill node that has told its token has done its part
                    self._suspicion.failed(node)
        if req.failover.error is not None:
            message += f"; {req.failover.error.message}"
        event("deadline", **req.fields, nodes=waiting)
        self._end(req, error=RequestError(message, status=408, code="deadline"))

    # --------------------------------------------------------------------------------- from the nodes
    def hear(self, node: Node, message: NodeToRouter) -> bool:
        """Take what a node says of requests, or of what it caches. False: the message is about something else."""
        match message:
            case Tokens(entries):
                self.on_tokens(node, entries)
            case Failed():
                self.on_failed(node, message)
            case NotCached(key):
                self.on_not_cached(node, key)
            case Moved(key):
                self.on_moved(node, key)
            case RunsAlone(key):
                self.on_runs_alone(node, key)
            case MoveWanted(keys):
                self.on_move_wanted(node, keys)
            case CacheEvents():
                if not node.prefixes.apply(message):
                    node.send(CacheResync())
            case _:
                return False
        return True

    def on_tokens(self, node: Node, entries: Sequence[TokenEntry]) -> None:
        """Take the tokens of one step of `node`. Tokens of ended sequences are dropped."""
        now, vocab_size = self._clock(), self._vocab_size()
        gaps: Counter[float] = Counter()
        for entry in entries:
            req = self._running.get(entry.key.rid)
            attempt = req.attempt_of(entry.key) if req is not None else None
            if req is None or attempt is None or node not in attempt.nodes:
                continue
            if why := why_wrong(entry, attempt, req.work, node.role, vocab_size):
                self._disbelieve(req, attempt, node, f"told {why}")
                continue
            attempt.num_told[node.role] = entry.position + len(entry.token_ids)
            if entry.report is not None:
                attempt.reports[node.role], _ = believed(entry.report)
            if entry.token_ids:
                self._view.computed(attempt)
            if attempt is req.moving:
                entry = self._moves.arrived(req, entry)
            if node.role is Role.DECODE and attempt is req.attempt:
                # The decode node has the pages and the Handoff, so the prefill node holds nothing any more.
                for prefill in attempt.holders:
                    if prefill is not node:
                        self._suspicion.served(prefill)
                        self._view.computed(attempt)
                attempt.holders = [node]
            if entry.finish is not None:
                attempt.finished_by = node
                self._suspicion.served(node)
            req.arrive_logprobs(entry)
            since = req.last_token_at
            if req.numerics is None:
                req.numerics = Numerics(attempt.nodes[0].numerics, attempt.nodes[-1].numerics)
            num_new = req.arrive(entry.position, entry.token_ids, entry.finish, now)
            if num_new and since is not None:
                gaps[(now - since) / num_new] += num_new
            elif num_new:
                self._metrics.first_tokens(num_new, now - req.started_at)
                self.queue.leave(req.key.rid)
            if entry.report is not None and req.start is None:
                req.start = measure_start(req)
            if req.ended:
                self._forget(req, Cancel(req.key))
            elif req.failover.crashed and req.failover.is_past_crashes(len(req.output_ids)):
                req.failover.crashed.clear()
                self._suspicion.trials.pop(req, None)
        self._metrics.later_tokens(gaps)

    def on_failed(self, node: Node, failed: Failed) -> None:
        """End a sequence that `node` has refused, or send it to other nodes, since `node` could not go on with it.

        A move that has failed is given up.
        """
        req = self._running.get(failed.key.rid)
        if req is not None and req.moving is not None and req.moving.key == failed.key:
            if node in (*req.attempt.holders, *req.moving.nodes):
                event("move_failed", **req.fields, node=node.ref.incarnation, reason=failed.message)
                self._moves.failed(req, node)
            return
        if req is not None and req.key == failed.key and req.left is not None and node in req.left.nodes:
            # The source had let the sequence go by an earlier move, so that the target waits in vain.
            self._fail_over(req, node, Cause.MOVE_FAILED, RequestError(failed.message, status=503))
            return
        req = self._held(node, failed.key)
        if req is None:
            return
        req.attempt.holders.remove(node)
        status = failed.status if 400 <= failed.status < 600 else 500
        error = RequestError(failed.message, status=status, param=failed.param)
        if status < 500 or failed.param is not None:
            self._end(req, error=error)
            return
        if failed.handed_back:
            # The only node may hand a sequence back again and again, while a suspect runs alone there.
            again_s = _RETRY_S if node.ref.incarnation in req.failover.avoid else 0.0
            self._fail_over(req, node, Cause.NODE_DRAINED, error, avoid=node.ref.incarnation, pause_s=again_s)
            return
        blamed = next((n for n in req.attempt.nodes if n.ref.incarnation == failed.blames), node)
        if status != 503:
            self._suspicion.failed(blamed)
        cause = Cause.TRANSFER_FAILED if failed.blames else Cause.NODE_FAILED
        self._fail_over(req, node, cause, error, avoid=blamed.ref.incarnation)

    def on_not_cached(self, node: Node, key: ReqKey) -> None:
        """Send a sequence through both fleets, since `node` has evicted the prefix for which it was chosen."""
        req = self._held(node, key)
        if req is None:
            return
        if req.failover.split:
            self._disbelieve(
                req, req.attempt, node, "told that a prompt is not cached where that was not asked"
            )
            return
        req.attempt.holders.remove(node)
        req.failover.split = True
        req.failover.since = self._clock()
        req.failover.error = RequestError(
            f"{node.ref.node_id} has evicted the prefix of this prompt", status=503
        )
        self._leave_nodes(req, Cancel(req.key))
        req.next_attempt()
        self._resend(req, req.key)

    def on_moved(self, node: Node, key: ReqKey) -> None:
        """Note that `node` has let a sequence go, since the target of its move has all of it."""
        req = self._held(node, key)
        if req is None:
            return
        req.attempt.holders.remove(node)
        if req.moving is not None:
            self._moves.moved(req)
        else:  # the target has failed meanwhile, and no node has the sequence
            error = RequestError(f"it left {node.ref.node_id} for a node that then failed", status=503)
            self._fail_over(req, node, Cause.MOVE_FAILED, error)

    def on_runs_alone(self, node: Node, key: ReqKey) -> None:
        """Note that `node` has begun a suspect, and holds nothing else."""
        req = self._held(node, key)
        if req in self._suspicion.trials:
            self._suspicion.trials[req] = True

    def on_move_wanted(self, node: Node, keys: Sequence[ReqKey]) -> None:
        """Move sequences that `node` wants to be rid of, if another node has room."""
        for key in keys:
            req = self._held(node, key)
            if req is not None:
                self._moves.start(req, node)

    def on_node_alive(self, node: Node) -> None:
        """Take back that `node` has crashed: its process runs, and only the connection was lost."""
        for req in self._running.values():
            req.failover.crashed.discard(node.ref.incarnation)
            req.failover.blamed.pop(node.ref.incarnation, None)

    def on_node_lost(self, node: Node, reason: str, loss: Loss) -> None:
        """Send the sequences that `node` held to other nodes."""
        held = self._held_by(node)
        crashed = loss is Loss.CRASHED
        if loss is not Loss.LEFT:
            self._suspicion.failed(node)
        for req in self._moving_to(node):
            self._moves.failed(req, node)
            if crashed:
                req.failover.crash(node.ref.incarnation, len(req.output_ids))
        for req in held:
            if node in req.attempt.holders:
                req.attempt.holders.remove(node)
            error = RequestError(
                f"{node.role} node {node.ref.node_id} was lost: {reason}", status=503, code="node_lost"
            )
            was_tried = crashed and self._suspicion.trials.get(req, False)
            if crashed:
                req.failover.crash(node.ref.incarnation, len(req.output_ids))
            lost = Cause.PREFILL_NODE_LOST if node.role is Role.PREFILL else Cause.DECODE_NODE_LOST
            self._fail_over(req, node, lost, error, was_tried=was_tried)
        for req in self._running.values():
            if crashed and req.failover.may_have_crashed(node.ref.incarnation, len(req.output_ids)):
                req.failover.crash(node.ref.incarnation, len(req.output_ids))
            req.failover.blamed.pop(node.ref.incarnation, None)
        self._view.lost(node)

    # ---------------------------------------------------------------------------- removing a node
    def num_held(self, node: Node) -> int:
        """The number of sequences that `node` holds, or that are on their way to it."""
        return len(self._held_by(node)) + len(self._moving_to(node))

    def move_held(self, node: Node) -> None:
        """Begin to move the sequences that `node` holds to other nodes, a few at a time."""
        held = self._held_by(node)
        num_moving = sum(req.moving is not None for req in held)
        for req in held:
            if num_moving >= _MOVES_AT_ONCE:
                break
            num_moving += self._moves.start(req, node)

    def fail_over_held(self, node: Node, reason: str) -> int:
        """Send the sequences that `node` holds to other nodes and cancel them there; returns their number.

        Moves to it are given up.
        """
        for req in self._moving_to(node):
            self._moves.failed(req, None)
        held = self._held_by(node)
        for req in held:
            message = f"{node.role} node {node.ref.node_id} is drained: {reason}"
            error = RequestError(message, status=503, code="node_drained")
            self._fail_over(req, node, Cause.NODE_DRAINED, error)
        return len(held)

    # ------------------------------------------------------------------------------------------ inside
    def _refuse_late(self, route: Route) -> None:
        """Raise RequestError if the first token would come too late, and would come sooner without other requests.

        The prefill node goes on with earlier prompts while the decode node has this one wait for pages: the longer
        of both waits counts.
        """
        limit_s, first_token = self._options.ttft_limit_s, route.first_token
        if limit_s is None or first_token is None:
            return
        wait_s = first_token.wait_s
        if route.decode is not None:
            place_s = self._view.place_wait_s(route.decode, route.num_pages, first_token.compute_s)
            wait_s = max(wait_s, place_s)
        seconds = wait_s + first_token.compute_s
        if seconds <= limit_s or not wait_s:
            return
        self._metrics.rejected(late=True)
        raise RequestError(
            f"the first token would take about {seconds:.1f} s, {wait_s:.1f} s of it behind other requests; "
            f"more than {limit_s:g} s are refused (--ttft-limit-s); try again later",
            status=429,
            code="ttft_limit",
            retry_after_s=retry_after_s(seconds - limit_s),
        )

    def _next_key(self) -> ReqKey:
        return ReqKey(self._incarnation, str(next(self._rids)))

    def _send(self, req: RunningReq, work: Work, route: Route) -> None:
        req.begin(route.nodes, self._clock(), route.num_queued_tokens, route.num_pages)
        self._view.sent(req.attempt)
        event(
            "dispatched",
            level=logging.DEBUG,
            **req.fields,
            nodes=",".join(n.ref.incarnation for n in route.nodes),
            why=route.why,
        )
        for node in route.nodes:
            self._suspicion.sent(node)
        if route.decode is not None:
            source = route.prefill.ref if route.prefill else None
            alone_tokens = TRIAL_TOKENS if req in self._suspicion.trials else 0
            route.decode.send(
                Decode(
                    req.key,
                    work,
                    source,
                    route.local_prefill_limit,
                    alone_tokens=alone_tokens,
                    evict_first=route.evicts_first is route.decode,
                )
            )
        if route.prefill is not None:
            target = route.decode.ref if route.decode else None
            lent = None
            if (fetch := route.fetch) is not None:
                if fetch.is_linked:
                    lent = Source(fetch.lender.ref, fetch.num_pages)
                # Without a link there is one for the next request, and this one does not wait for it.
                fetch.lender.send(Lend(req.key, route.prefill.ref, work if fetch.is_linked else None))
            route.prefill.send(
                Prefill(req.key, work, target, lent, evict_first=route.evicts_first is route.prefill)
            )

    def _held(self, node: Node, key: ReqKey) -> RunningReq | None:
        """The sequence whose latest attempt is `key` and held by `node`, if there is one."""
        req = self._running.get(key.rid)
        return req if req is not None and req.key == key and node in req.attempt.holders else None

    def _held_by(self, node: Node) -> list[RunningReq]:
        return [req for req in self._running.values() if req.needs(node)]

    def _moving_to(self, node: Node) -> list[RunningReq]:
        return [req for req in self._running.values() if req.moving is not None and node in req.moving.nodes]

    def _disbelieve(self, req: RunningReq, attempt: Attempt, node: Node, why: str) -> None:
        """Take a sequence from `node`, which has told of `attempt` what cannot be, if the sequence needs it."""
        self._wrong_answer(node=node.ref.incarnation, **attempt.key.fields, reason=why)
        self._suspicion.failed(node)
        if attempt is req.moving:
            self._moves.failed(req, None)
        elif req.needs(node):
            error = RequestError(
                f"{node.role} node {node.ref.node_id} {why}", status=503, code="wrong_answer"
            )
            self._fail_over(req, node, Cause.NODE_FAILED, error, avoid=node.ref.incarnation)

    def _fail_over(
        self,
        req: RunningReq,
        node: Node,
        cause: Cause,
        error: RequestError,
        *,
        avoid: str | None = None,
        pause_s: float = 0.0,
        was_tried: bool = False,
    ) -> None:
        """Take a sequence from its nodes, and send the next attempt to others, after `pause_s` at the earliest.

        With `was_tried`, it is a suspect that ran alone on `node` when that crashed. The caller has
        taken nodes that hold nothing of the sequence any more out of `req.attempt.holders`.
        """
        self._leave_nodes(req, Cancel(req.key))
        self._suspicion.trials.pop(req, None)
        failover = req.failover
        failover.failed(len(req.output_ids), self._clock(), error, cause)
        if avoid is not None:
            failover.avoid.add(avoid)
            if cause is Cause.TRANSFER_FAILED and error.status == 503:  # a peer may notice a crash first
                failover.blamed[avoid] = self._clock() + _VERDICT_S
        event(
            "failover",
            **req.fields,
            cause=cause.value,
            node=node.ref.incarnation,
            position=len(req.output_ids),
            reason=error.message,
        )
        req.next_attempt()
        if failover.num_failures > MAX_FAILURES:
            self._give_up(req, error)
            return
        if was_tried:
            self._later(_VERDICT_S, partial(self._judge, req, req.key, node))
        elif pause_s := max(pause_s, failover.pause_s):
            self._later(pause_s, partial(self._resend, req, req.key))
        else:
            self._resend(req, req.key)

    def _resend(self, req: RunningReq, key: ReqKey) -> None:
        """Send the attempt `key` as soon as there are nodes for it, unless the sequence has ended or moved on."""
        if req.ended or req.key != key:
            return
        failover, work = req.failover, req.remaining_work
        assert failover.since is not None and failover.error is not None
        try:
            route = self._next_route(req, work)
        except RequestError as no_node:
            if self._clock() < failover.since + self._options.failover_timeout_s:
                self._later(_RETRY_S, partial(self._resend, req, key))
                return
            message = (
                f"{failover.error.message}; no node could continue this request within "
                f"{self._options.failover_timeout_s:g} s: {no_node.message}"
            )
            self._give_up(req, RequestError(message, status=503, code="no_node"))
            return
        if route is None:  # which does not use up the time to find a node
            failover.since = self._clock()
            self._later(_RETRY_S, partial(self._resend, req, key))
            return
        if failover.cause is not None:
            self._metrics.failed_over(failover.cause)
        failover.since = failover.cause = None
        if req.numerics is not None and not route.continues(req.numerics):
            event("inexact_continuation", **req.fields, numerics=req.numerics, now=route.numerics)
            self._metrics.count("baton:num_inexact_continuations")
        self._send(req, work, route)

    def _next_route(self, req: RunningReq, work: Work) -> Route | None:
        """The nodes of the next attempt. None while too many other suspects are tried, or it may become one.

        Raises RequestError while there are no nodes.
        """
        failover = req.failover
        if failover.may_be_suspect(self._clock()):
            return None
        if not failover.is_suspect:
            return self._placement.route(
                work, split=failover.split, again=True, avoid=failover.avoid, like=req.numerics
            )
        route = self._placement.route_alone(work, avoid=failover.avoid, like=req.numerics)
        if len(self._suspicion.trials) >= self._placement.max_trials or any(
            map(self._suspicion.tries_on, route.nodes)
        ):
            return None
        self._suspicion.trials[req] = False
        return route

    def _give_up(self, req: RunningReq, error: RequestError) -> None:
        event("failover_given_up", **req.fields, failures=req.failover.num_failures, reason=error.message)
        self._end(req, error=error)

    def _judge(self, req: RunningReq, key: ReqKey, node: Node) -> None:
        """Convict a suspect that ran alone on `node` when that crashed, unless the process has turned out to live."""
        if req.ended or req.key != key:
            return
        if node.ref.incarnation not in req.failover.crashed:
            self._resend(req, key)
            return
        num_crashes = len(req.failover.crashed)
        event("request_convicted", **req.fields, node=node.ref.incarnation, crashes=num_crashes)
        self._metrics.count("baton:num_poison_requests")
        message = (
            f"{num_crashes} nodes crashed while they worked on this request, the last on nothing else; "
            "it is not tried again"
        )
        self._end(req, error=RequestError(message, status=500, code="poison_request"))

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
        self._suspicion.trials.pop(req, None)
        del self._running[req.key.rid]
        self.queue.leave(req.key.rid)
        self._metrics.ended(req)
        event("sequence_ended", level=logging.DEBUG, **req.fields, tokens=len(req.output_ids))

    def _leave_nodes(self, req: RunningReq, message: Cancel | Stop) -> None:
        """Take the latest attempt from its nodes. Holders get `message`, but for the node that finished."""
        if req.moving is not None:
            self._moves.failed(req, None)
        for node in req.attempt.holders:
            if node is not req.attempt.finished_by:
                node.send(message)
        if req.attempt.nodes:
            self._view.ended(req.attempt, goes_on=not req.ended)
        req.attempt.holders = []


def _clipped(work: Work, max_new_tokens: int, rid: str) -> Work:
    """The work of the request `rid` with at most `max_new_tokens`."""
    least = min(work.params.min_new_tokens, max_new_tokens)
    params = msgspec.structs.replace(work.params, max_new_tokens=max_new_tokens, min_new_tokens=least)
    return msgspec.structs.replace(work, params=params, rid=rid)
