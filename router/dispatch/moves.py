"""Moves running sequences from one decode node, the source, to another, the target, while they are streamed.

start ── Decode(moving) ─▶ target    reserves room at once, or refuses
   └──── Move ──────────▶ source     runs on as the latest attempt while its pages leave, then hands over
         target's first tokens, or Moved of the source, make the move the latest attempt
         a failure of either before that ends the move, and the sequence runs on at the source

A source that is lost before the move has ended makes a failover, as any lost holder does.
"""

from __future__ import annotations

from math import ceil

import msgspec

from router.dispatch.fleet_view import FleetView
from router.dispatch.metrics import Metrics
from router.dispatch.node import Node
from router.dispatch.placement import Placement
from router.dispatch.running_req import Attempt, RunningReq
from shared.errors import RequestError
from shared.log import event
from shared.protocol.messages import Cancel, Decode, Move, Role, TokenEntry
from shared.timeline import Clock

_RETRY_S = 0.5
"""A sequence whose move has failed is not moved again before that; the pause doubles with each move that fails."""
_MAX_DOUBLINGS = 5


class Moves:
    """The moves of one router's sequences. `RunningReq.moving` has the attempt of a move that is under way."""

    def __init__(self, placement: Placement, view: FleetView, metrics: Metrics, clock: Clock) -> None:
        self._placement = placement
        self._view = view
        self._metrics = metrics
        self._clock = clock

    def start(self, req: RunningReq, source: Node) -> bool:
        """Begin to move a sequence from `source`; False if it does not run there, or no other node can have it.

        A sequence that may have crashed a node stays where it is until it has passed the place of the crash.
        """
        streams_there = req.attempt.holders == [source] and source.role is Role.DECODE and req.output_ids
        if not streams_there or req.moving or req.awaits_left or self._clock() < req.movable_at:
            return False
        if req.failover.is_suspect or not req.failover.is_past_crashes(len(req.output_ids)):
            return False
        work = req.remaining_work
        try:
            target = self._placement.target(work, source, req.failed_moves)
        except RequestError:
            return False
        num_pages = ceil((len(work.input_ids) + len(work.output_ids)) / target.page_size)
        req.moving = Attempt(
            req.next_key(),
            (target,),
            first=len(work.output_ids),
            is_move=True,
            num_pages=num_pages,
            holders=[target],
            sent_at=self._clock(),
        )
        self._view.sent(req.moving)
        target.send(Decode(req.moving.key, work, source.ref, moving=True))
        source.send(Move(req.key, req.moving.key, target.ref))
        event("move", **req.fields, source=source.ref.incarnation, target=target.ref.incarnation)
        return True

    def arrived(self, req: RunningReq, entry: TokenEntry) -> TokenEntry:
        """The target has spoken: it has the sequence, and the source lets go. Returns the part of `entry` to take.

        The target repeats the tokens that the source has sent since the start of the move, and does not know their
        logprobs. Where those are wanted, the tokens are taken from the source, whose messages are on their way.
        """
        self._switch(req, awaited=entry.position + len(entry.token_ids))
        if req.work.params.logprobs is not None and entry.logprobs is None:
            return msgspec.structs.replace(entry, token_ids=())
        return entry

    def moved(self, req: RunningReq) -> None:
        """The source has sent all its tokens, and the target has the rest."""
        self._switch(req, awaited=0)

    def failed(self, req: RunningReq, node: Node | None) -> None:
        """End a move that `node`, the source or the target, cannot go on with; the other is told."""
        moving = req.moving
        assert moving is not None
        req.moving = None
        req.movable_at = self._clock() + _RETRY_S * 2 ** min(req.failed_moves.total(), _MAX_DOUBLINGS)
        req.failed_moves[moving.nodes[0].ref.incarnation] += 1
        for other in (*req.attempt.holders, *moving.holders):
            if other is not node:
                other.send(Cancel(moving.key))
        self._view.ended(moving, goes_on=True)
        self._metrics.count("baton:num_failed_moves")

    def _switch(self, req: RunningReq, *, awaited: int) -> None:
        """Make the move the latest attempt. Tokens of the source at positions before `awaited` may still come."""
        source, moving = req.attempt, req.moving
        assert moving is not None
        for node in source.holders:
            node.send(Cancel(source.key))
        self._view.ended(source, goes_on=True)
        source.holders = []
        req.attempts.append(moving)
        req.moving, req.left, req.left_until = None, source, awaited
        req.failed_moves.clear()
        self._metrics.count("baton:num_moves")
