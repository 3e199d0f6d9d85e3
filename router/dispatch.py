"""The life of one sequence: choose its nodes, send it, put its tokens in order, and end it on every node.

    start ── Prefill ─▶ P ┐                       the node that finishes it, fails it or dies decides how it ends;
       └──── Decode ──▶ D ┴─ Tokens ─▶ on_tokens  every other holder is told: Cancel, or Stop after a stop string

Who gets what (P a prefill node, D a decode node):

    at most one new token       P alone          nobody needs the KV afterwards
    short prompt                D alone          computing it there is cheaper than moving its pages
    otherwise                   P and D          D reserves pages, P computes and hands over
    no live P                   D alone          degraded, but served
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.metrics import Metrics
from router.policy import RoutingPolicy
from router.running_req import Aborted, Node, RunningReq
from shared.errors import RequestError
from shared.log import event
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Prefill,
    ReqKey,
    Role,
    Stop,
    TokenEntry,
)
from shared.protocol.sampling_params import SamplingParams
from shared.timeline import Clock


class Fleet(Protocol):
    """The nodes there are. Real: `membership.Membership`."""

    def live(self, role: Role) -> Sequence[Node]:
        """The nodes of a role that can be sent work now."""
        ...

    def why_none(self, role: Role) -> str:
        """Why `live(role)` is empty, for the client."""
        ...


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long a sequence may wait before it is given up, in seconds."""

    first_token_s: float
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be computed. `split` forces the way through both fleets, however short the prompt."""

    input_ids: tuple[int, ...]
    params: SamplingParams
    extra_key: str = ""
    split: bool = False


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
        self._fleet = fleet
        self._incarnation = incarnation
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._deadlines = deadlines
        self._local_prefill_tokens = local_prefill_tokens
        self._metrics = metrics
        self._clock = clock
        self._rids = itertools.count(1)
        self._running: dict[str, RunningReq] = {}
        self._closed: str | None = None

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    # ------------------------------------------------------------------------------- towards clients
    def start(self, work: Work, wake: Callable[[], None]) -> RunningReq:
        """Send a sequence to its nodes. Raises RequestError when none can take it."""
        if self._closed is not None:
            raise RequestError(self._closed, status=503)
        max_new_tokens, prefill, decode = self._plan(work)
        params = msgspec.structs.replace(
            work.params,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(work.params.min_new_tokens, max_new_tokens),
        )
        key = ReqKey(self._incarnation, str(next(self._rids)))
        req = RunningReq(
            key,
            prompt_len=len(work.input_ids),
            max_new_tokens=max_new_tokens,
            prefill=prefill,
            decode=decode,
            wake=wake,
            now=self._clock(),
        )
        self._running[key.rid] = req
        self._metrics.started(req)
        output_ids: tuple[int, ...] = ()
        if decode is not None:
            source = prefill.ref if prefill else None
            decode.send(Decode(key, work.input_ids, output_ids, params, source, work.extra_key))
        if prefill is not None:
            target = decode.ref if decode else None
            prefill.send(Prefill(key, work.input_ids, output_ids, params, target, work.extra_key))
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
        """Until the sequence's deadline for its first, or its next, token."""
        if req.last_token_at is None:
            return req.started_at + self._deadlines.first_token_s - self._clock()
        return req.last_token_at + self._deadlines.stall_s - self._clock()

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
        now = self._clock()
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
            since = req.last_token_at
            num_new = req.arrive(entry.position, entry.token_ids, entry.finish, now)
            self._metrics.tokens(req, num_new, since, now)
            if req.ended:
                self._tell_and_forget(req, Cancel(req.key))

    def on_failed(self, node: Node, failed: Failed) -> None:
        """`node` has given a sequence up."""
        req = self._running.get(failed.key.rid)
        if req is None or req.key != failed.key or node not in req.holders:
            return
        req.holders.remove(node)
        status = failed.status if 400 <= failed.status < 600 else 500
        self._end(req, error=RequestError(failed.message, status=status, param=failed.param))

    def on_node_lost(self, node: Node, reason: str) -> None:
        """The connection to `node` is over; what it held is lost."""
        for req in list(self._running.values()):
            if node in req.holders:
                req.holders.remove(node)
                message = f"{node.role} node {node.ref.node_id} was lost: {reason}"
                self._end(req, error=RequestError(message, status=503, code="node_lost"))

    # ------------------------------------------------------------------------------------------ inside
    def _plan(self, work: Work) -> tuple[int, Node | None, Node | None]:
        """How many new tokens there is room for, and who computes them. Raises RequestError when nobody can."""
        prompt_len, wanted = len(work.input_ids), work.params.max_new_tokens
        least = prompt_len + min(wanted, 1)
        prefills, decodes = self._with_room(Role.PREFILL, least), self._with_room(Role.DECODE, least)
        decode = None
        if wanted > 1 or not prefills:
            if not decodes:
                raise self._nobody(prompt_len)
            decode = self._decode_policy.choose(decodes)
            wanted = min(wanted, _room(decode) - prompt_len)
        short = prompt_len <= self._local_prefill_tokens and wanted > 1 and not work.split
        prefill = self._prefill_policy.choose(prefills) if prefills and not short else None
        if prefill is not None and wanted <= 1:
            decode = None
        return wanted, prefill, decode

    def _with_room(self, role: Role, num_tokens: int) -> list[Node]:
        return [node for node in self._fleet.live(role) if _room(node) >= num_tokens]

    def _nobody(self, prompt_len: int) -> RequestError:
        live = self._fleet.live(Role.DECODE)
        if not live:
            return RequestError(self._fleet.why_none(Role.DECODE), status=503, code="no_node")
        return RequestError(
            f"the prompt has {prompt_len} tokens, which leaves no room for output: prompt and output together "
            f"may have at most {max(map(_room, live))} tokens here",
            code="context_length_exceeded",
        )

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
        del self._running[req.key.rid]
        self._metrics.ended(req)


def _room(node: Node) -> int:
    """Tokens that one sequence may have on a node, prompt and output together."""
    return min(node.limits.context_length, node.limits.max_total_num_tokens)
