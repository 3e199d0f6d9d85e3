"""Holds a real node of a test in a named stage, from outside.

The test writes an `Order` into a file, which a thread of the node reads. When all that the order asks for is there,
the node tells so in a second file, a `Sight`. From then on it stays as it is until the order is another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from shared.engine.loop_parts import NodeParts
from shared.engine.node_process import Scheduler
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.states import Received, ReceiveEvent, SendEnded
from shared.protocol.messages import Cancel, ReqKey
from shared.protocol.transfer_messages import Ready
from shared.scheduling.req import Req
from shared.timeline import ReqStage

POLL_S = 0.005
SLOW_STEP_S = 0.05
"""A decode step takes so long while requests are on their way to another node, so that they do not end before."""
MUSTER_STEP_S = 0.2
"""And so long until all of them are on their way, which takes messages between three processes on a busy machine."""
NUM_STREAMED = 3
"""Output tokens after which a request counts as streaming."""


class Stage(StrEnum):
    """Where the requests of a cell are when something dies."""

    QUEUED = "queued"
    COMPILING = "compiling a grammar"
    PREFILLING = "prefilling a middle chunk"
    TRANSFERRING = "transferring"
    HANDED_OFF = "handed off"
    STREAMING = "streaming"
    RETRACTED = "retracted to host"
    RE_PREFILLING = "re-prefilling"
    MOVING = "moving"
    DRAINING = "draining"
    ABORTING = "aborting"


_MUSTERED = (Stage.COMPILING, Stage.STREAMING, Stage.RETRACTED, Stage.RE_PREFILLING)
"""Stages in which all requests begin to stream together."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is to do. `number` names the order; `stage` is where `count` sequences are to be held.

    With `muster`, the node lets no sequence take room until so many wait for it, so that all go on together. `stall`:
    the loop stands still. `cut_links`: every link breaks, as often as the order is given. `plants` names faults.
    """

    number: int = 0
    stage: Stage | None = None
    count: int = 0
    muster: int = 0
    stall: bool = False
    cut_links: bool = False
    plants: tuple[str, ...] = ()


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has seen of its requests when the order `number` was fulfilled."""

    number: int
    keys: tuple[str, ...]


def write(path: Path, message: Order | Sight) -> None:
    """Replace the file as a whole."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(message))
    temporary.replace(path)


class Orders:
    """The latest order, read by a thread of its own; `see` answers it."""

    def __init__(self, order_path: Path) -> None:
        self.path = order_path
        self.seen_path = order_path.with_suffix(".seen")
        self.current = Order()
        self.released = threading.Condition()
        self._seen = 0
        self._read_at = 0
        self._links: list[KVReceiver] = []
        self._read()
        threading.Thread(target=self._watch, name="orders", daemon=True).start()

    def cuts_links_of(self, receiver: KVReceiver) -> None:
        """Have an order with `cut_links` break the links of this receiver."""
        self._links.append(receiver)

    def is_seen(self, order: Order) -> bool:
        """Whether the order was fulfilled before."""
        return self._seen == order.number

    def see(self, order: Order, keys: list[ReqKey]) -> None:
        """Tell the test that these requests are where the order wants them, once."""
        if not self.is_seen(order):
            self._seen = order.number
            write(self.seen_path, Sight(number=order.number, keys=tuple(sorted(map(str, keys)))))

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            self._read()

    def _read(self) -> None:
        if not self.path.exists() or (changed := os.stat(self.path).st_mtime_ns) == self._read_at:
            return
        self._read_at = changed
        order = msgspec.json.decode(self.path.read_bytes(), type=Order)
        with self.released:
            self.current = order
            self.released.notify_all()
        self.path.with_suffix(".read").write_text(str(order.number))
        if order.cut_links:
            for receiver in self._links:
                for link in [link for link in receiver._links if link.live]:
                    link.abort_ops()
            self.see(order, [])


class HeldScheduler:
    """A node's scheduler that takes no turn while its requests are to be held where they are."""

    def __init__(self, scheduler: Scheduler, orders: Orders, holds: Callable[[Order], bool]) -> None:
        self._scheduler = scheduler
        self._orders = orders
        self._holds = holds

    @property
    def reqs(self) -> Sized:
        return self._scheduler.reqs

    def step(self) -> bool:
        while self._holds(order := self._orders.current) or order.stall:
            if order.stall:
                self._orders.see(order, [])
            time.sleep(POLL_S)
        return self._scheduler.step()

    def close(self, reason: str) -> None:
        self._scheduler.close(reason)


class HeldPrefill:
    """The stages that a prefill node sees."""

    def __init__(self, parts: NodeParts, scheduler: PrefillScheduler, orders: Orders) -> None:
        self._scheduler = scheduler
        self._orders = orders
        self._arrived: list[Ready | SendEnded] = []
        self._poll = parts.transfer.sender.poll
        hold(parts.transfer.sender, "poll", self.poll)

    def poll(self) -> list[Ready | SendEnded]:
        """None is computed before all are here: a small model would be through with the first by then."""
        order = self._orders.current
        self._arrived += self._poll()
        if order.stage is Stage.PREFILLING and len(self._scheduler.reqs) < order.count:
            return []
        arrived, self._arrived = self._arrived, []
        return arrived

    def holds(self, order: Order) -> bool:
        """Whether the loop is to stand still now."""
        reqs = list(self._scheduler.reqs.values())
        match order.stage:
            case Stage.PREFILLING:
                chunked = self._scheduler.batcher.chunked_req
                if chunked is None or chunked.kv is None or len(reqs) < order.count:
                    return False
                if not chunked.kv.num_tree_pages < chunked.kv.num_pages or not chunked.kv.kv_committed_len:
                    return False
                self._orders.see(order, [req.key for req in reqs])
                return True
            case Stage.TRANSFERRING:
                moving = [req.key for req in reqs if req.timeline.stage is ReqStage.TRANSFERRING]
                if len(moving) >= order.count:
                    self._orders.see(order, moving)
        return False


class HeldDecode:
    """The stages that a decode node sees."""

    def __init__(self, parts: NodeParts, scheduler: DecodeScheduler, orders: Orders) -> None:
        self._ledger = parts.engine.ledger
        self._port = parts.router_port
        self._scheduler = scheduler
        self._orders = orders
        self._arrived: list[ReceiveEvent] = []
        self._num_granted = 0
        self._squeezed: list[int] = []
        receiver = parts.transfer.receiver
        orders.cuts_links_of(receiver)
        self._poll, self._wants = receiver.poll, receiver.wants
        self._compile = parts.engine.grammars.compile
        self._reserve = scheduler.prealloc_queue.reserve
        hold(receiver, "poll", self.poll)
        hold(receiver, "wants", self.wants)
        hold(scheduler.prealloc_queue, "reserve", self.reserve)
        hold(scheduler.grammar_queue, "take", self.take_compiled)
        self._take_compiled = type(scheduler.grammar_queue).take.__get__(scheduler.grammar_queue)

    # ------------------------------------------------------------------------- instead of the node's own
    def reserve(self, *conditions: Any) -> Any:
        """Nothing takes room while requests are mustered, or held in the queue."""
        order, queue = self._orders.current, self._scheduler.prealloc_queue
        waits = len(queue) < order.muster and not self._orders.is_seen(order)
        if order.stage is Stage.QUEUED and len(queue) >= order.count:
            self._orders.see(order, list(self._scheduler.reqs))
        if (order.stage is Stage.QUEUED or waits) and len(self._scheduler.transfer_queue) < max(
            1, order.count
        ):
            return self._reserve(lambda req: False, lambda req: False)
        return self._reserve(*conditions)

    def wants(self, key: ReqKey) -> bool:
        """The second chunk, and every later one, is not granted while transfers are held."""
        self._num_granted += 1
        with self._orders.released:
            self._orders.released.wait_for(
                lambda: (
                    self._orders.current.stage not in (Stage.TRANSFERRING, Stage.ABORTING)
                    or self._num_granted <= 1
                )
            )
        return self._wants(key)

    def poll(self) -> list[ReceiveEvent]:
        """Whole requests are not taken over before all are there, or while they are held handed off."""
        order = self._orders.current
        self._arrived += self._poll()
        whole = [event.key for event in self._arrived if isinstance(event, Received)]
        mustered = order.count - (order.stage is Stage.COMPILING)
        waits = order.stage in _MUSTERED and not (
            self._orders.is_seen(order) or len(whole) >= mustered or self._scheduler.batcher.running_batch
        )
        if order.stage is Stage.HANDED_OFF and len(whole) >= order.count:
            self._orders.see(order, whole)
        if waits or order.stage is Stage.HANDED_OFF:
            return []
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_compiled(self) -> Any:
        """No grammar is ready while it is held in compilation."""
        return [] if self._orders.current.stage is Stage.COMPILING else self._take_compiled()

    # ------------------------------------------------------------------------------------ the loop
    def holds(self, order: Order) -> bool:
        """Whether the loop is to stand still now."""
        if order.stage not in (Stage.TRANSFERRING, Stage.ABORTING):
            self._num_granted = 0
        reqs = list(self._scheduler.reqs.values())
        streaming = [
            r for r in reqs if r.timeline.stage is ReqStage.DECODING and r.output_len >= NUM_STREAMED
        ]
        self._retract_some(order, len(streaming) >= order.count and not any(r.num_retractions for r in reqs))
        held: list[Req] = []
        match order.stage:
            case Stage.COMPILING:
                if len(self._scheduler.grammar_queue) and len(streaming) >= order.count - 1:
                    held = reqs
            case Stage.STREAMING if len(streaming) >= order.count:
                held = streaming
            case Stage.RETRACTED:
                held = [r for r in reqs if r.timeline.stage is ReqStage.RETRACTED and r.host_pages]
            case Stage.RE_PREFILLING:
                chunked = self._scheduler.batcher.chunked_req
                held = [r for r in reqs if r.num_retractions and r is chunked]
                if not held and any(r.timeline.stage is ReqStage.RETRACTED for r in reqs):
                    self._ledger.flush()  # else there would be nothing to compute
            case None if len(self._scheduler.moves):
                time.sleep(SLOW_STEP_S)
            case Stage.MOVING | Stage.DRAINING:
                moves = self._scheduler.moves
                held = [r for r in streaming if r in moves and moves._keys[r] in moves._inflight_queue]
                if len(held) < order.count:
                    if order.stage is Stage.MOVING:
                        self._port.want_moved([r.key for r in streaming if r not in moves])
                    held = []
                    time.sleep(MUSTER_STEP_S)
            case Stage.ABORTING:
                inbox = list(self._port._inbox)
                gone = {m.message.key for m in inbox if isinstance(m.message, Cancel)}
                held = [r for r in reqs if r.key in gone]
        if held:
            self._orders.see(order, [req.key for req in held])
        return bool(held)

    def _retract_some(self, order: Order, now: bool) -> None:
        """Turn the knob that forces retractions, and take the host's pages away where they are not wanted."""
        batcher, host = self._scheduler.batcher, self._ledger.host
        wanted = order.stage in (Stage.RETRACTED, Stage.RE_PREFILLING) and now
        batcher._options = replace(batcher._options, retract_every=2 if wanted else 0)
        if order.stage is Stage.RE_PREFILLING:
            self._squeezed += host.alloc(host.num_free) or []
        else:
            host.free(self._squeezed)
            self._squeezed = []


def hold(part: object, name: str, instead: Callable[..., Any]) -> None:
    """Have `part` use `instead` for its method `name`."""
    assert callable(getattr(part, name))
    setattr(part, name, instead)
