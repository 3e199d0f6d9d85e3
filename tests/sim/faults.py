"""Where a request is, and what can go wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from shared.protocol.messages import ReqKey, Role
from shared.timeline import ReqStage
from tests.sim.watched_fleet import WatchedFleet, WatchedNode, break_off


def is_empty(node: WatchedNode) -> bool:
    """It holds no request and no transfer."""
    sides = node.sides
    return not (node.scheduler.reqs or [*sides.sender.transfers, *sides.receiver.transfers])


class Place(StrEnum):
    """The queue or batch of a node that holds a request."""

    BOOTSTRAP = "bootstrap_queue"
    AHEAD = "bootstrap_queue, a chunk of it being computed ahead"
    WAITING = "waiting_queue"
    CHUNKED = "chunked_req"
    INFLIGHT = "inflight_queue"
    PREALLOC = "prealloc_queue"
    TRANSFER = "transfer_queue"
    RUNNING = "running_batch"
    RETRACTED = "retracted"
    ON_HOST = "retracted, its KV on the host"
    COPIED_BACK = "running_batch, its KV coming back from the host"


class Fault(StrEnum):
    """What happens to a request."""

    ABORT = "its client goes away"
    STOP = "the router finds a stop string"
    BREAK = "its transfer breaks"
    FORWARD = "the next forward of its node raises"
    KILL = "its node dies"


def places(node: WatchedNode) -> Iterator[tuple[Place, ReqKey]]:
    """Where each request of a node is."""
    waiting = {req.key for req in node.scheduler.batcher.waiting_queue}
    chunked = node.scheduler.batcher.chunked_req
    for key, req in node.scheduler.reqs.items():
        match req.timeline.stage:
            case ReqStage.QUEUED if node.role is Role.PREFILL and req is node.scheduler.run_ahead.chunk_of:
                yield Place.AHEAD, key
            case ReqStage.QUEUED if node.role is Role.PREFILL:
                yield (Place.WAITING if key in waiting else Place.BOOTSTRAP), key
            case ReqStage.QUEUED if key not in waiting:
                yield Place.PREALLOC, key
            case ReqStage.PREFILLING if req is chunked:
                yield Place.CHUNKED, key
            case ReqStage.TRANSFERRING:
                yield (Place.INFLIGHT if node.role is Role.PREFILL else Place.TRANSFER), key
            case ReqStage.DECODING:
                yield (Place.COPIED_BACK if req.host_pages else Place.RUNNING), key
            case ReqStage.RETRACTED:
                yield (Place.ON_HOST if req.host_pages else Place.RETRACTED), key


class Saboteur:
    """Injects one fault into the `nth` request that is seen at a place. Give `look` to a fleet as `on_step`."""

    def __init__(self, place: Place, fault: Fault, nth: int = 1) -> None:
        self.place = place
        self.fault = fault
        self.victim: ReqKey | None = None
        self.struck_at = 0.0
        self.fleet: WatchedFleet | None = None
        self._seen: set[ReqKey] = set()
        self._nth = nth

    def look(self, node: WatchedNode) -> None:
        """After each step of each node."""
        if self.victim is not None or self.fleet is None:
            return
        for place, key in places(node):
            if place is self.place and key not in self._seen:
                self._seen.add(key)
                if len(self._seen) == self._nth:
                    self.victim = key
                    # Not before what this step has said: its thread is ahead of the loop.
                    self.fleet.loop.at(node.clock.free_at, self._strike, self.fleet, node, key)
                    return

    def _strike(self, fleet: WatchedFleet, node: WatchedNode, key: ReqKey) -> None:
        outcome = fleet.outcomes[key.rid]
        self.struck_at = fleet.loop.now
        match self.fault:
            case Fault.ABORT if outcome.req is not None:
                fleet.dispatcher.release(outcome.req)
            case Fault.STOP if outcome.req is not None:
                fleet.dispatcher.stop(outcome.req, outcome.num_tokens)
            case Fault.BREAK:
                break_off(node.sides, key)
            case Fault.FORWARD:
                node.stream.fail_next = True
            case Fault.KILL:
                fleet.kill(node.ref.node_id)
                fleet.start(f"{node.ref.node_id}-again", node.role)
