"""A SimFleet that is watched, and in which forwards, transfers and nodes fail."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, SimFleet
from planner.simulator.node import SimNode, SimVitals
from planner.simulator.runner import SimResult, SimStream
from planner.simulator.transport import TIMED, NetworkModel, SimSides, Transport
from router.dispatch.node import Loss
from shared.kvcache.audit import audit_idle
from shared.protocol.messages import Decode, Prefill, ReqKey, Role, RouterToNode
from shared.protocol.transfer_messages import Offer, PeerLeft
from shared.scheduling.commit import Sampled
from shared.scheduling.plan import ScheduleBatch

OF_A_TRANSFER = Offer | TIMED
NOTICE_S = (0.005, 0.05)
"""Until the others notice that a node has died."""

OnLaunch = Callable[["WatchedNode", ScheduleBatch], None]
OnStep = Callable[["WatchedNode"], None]


@dataclass(frozen=True, kw_only=True)
class FaultyNetwork(NetworkModel):
    """Links on which messages are late and transfers break."""

    jitter_s: float = 0.0
    """By how much a message may be later than its latency."""
    transfer_fault: float = 0.0
    """Of a transfer breaking off, where each of its messages comes."""


class ForwardFailed(RuntimeError):
    """A fault: this forward raises."""


class FailedResult(SimResult):
    """A forward that raises when it has ended."""

    def wait(self) -> Sampled:
        super().wait()
        raise ForwardFailed("forward told to fail")


class WatchedStream(SimStream):
    """Its forwards are counted, and may fail."""

    on_launch: Callable[[ScheduleBatch], None] | None = None
    rng = random.Random(0)
    fail = 0.0
    fail_next = False
    num_extend_tokens = 0

    def submit(self, scheduled: ScheduleBatch) -> SimResult:
        if self.on_launch is not None:
            self.on_launch(scheduled)
        self.num_extend_tokens += sum(item.length for item in scheduled.extends)
        result = super().submit(scheduled)
        failed = self.fail_next or (self.fail > 0 and self.rng.random() < self.fail)
        self.fail_next = False
        return FailedResult(result.clock, result.done_at, result.token_ids) if failed else result


class WatchedVitals(SimVitals):
    """Lets a leak end the simulation, where it audits."""

    audits = False

    def _audit(self) -> None:
        if self.audits:
            audit_idle(self._ledger)


class WatchedNode(SimNode):
    """A node that dies, and whose steps are watched."""

    stream_type = WatchedStream
    vitals_type = WatchedVitals
    on_step: OnStep | None = None
    alive = True
    stream: WatchedStream
    vitals: WatchedVitals

    def __init__(self, *args: Any) -> None:
        self.rids: set[str] = set()
        """Of the requests that were sent to it."""
        super().__init__(*args)

    def send(self, message: RouterToNode) -> None:
        if isinstance(message, Prefill | Decode):
            self.rids.add(message.key.rid)
        super().send(message)

    def step(self) -> None:
        if self.alive:
            super().step()
            if self.on_step is not None:
                self.on_step(self)

    def hear(self, message: RouterToNode) -> None:
        if self.alive:
            super().hear(message)


class FaultyTransport(Transport):
    """Wires between nodes that die."""

    rng = random.Random(0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_arrival: defaultdict[tuple[str, str], float] = defaultdict(float)

    def kill(self, name: str) -> None:
        """A node is gone with all it held; the others notice one by one."""
        del self.sides[name]
        for other in list(self.sides.values()):
            self.loop.at(self.loop.now + self.rng.uniform(*NOTICE_S), lose, other, name)

    def deliver(self, at: float, sender: str, to: str, run: Callable[..., None], *args: object) -> None:
        jitter_s = getattr(self.model, "jitter_s", 0.0)
        if jitter_s:
            at = max(at + self.rng.uniform(0, jitter_s), self._last_arrival[sender, to])
            self._last_arrival[sender, to] = at
        super().deliver(at, sender, to, run, *args)

    def hand_over(self, sender: str, to: str, message: Any, by_sender: bool) -> None:
        is_of_a_transfer = isinstance(message, OF_A_TRANSFER)
        if to not in self.sides or (sender not in self.sides and not is_of_a_transfer):
            return
        fault = getattr(self.model, "transfer_fault", 0.0)
        if is_of_a_transfer and fault > 0 and self.rng.random() < fault:
            break_off(self.sides[to], message.key)
        super().hand_over(sender, to, message, by_sender)


def lose(sides: SimSides, peer: str) -> None:
    """A node notices now that a peer is gone."""
    sides.sender.on_disconnected(peer, "the decode node is gone")
    sides.receiver.on_message(peer, PeerLeft())
    sides.step_links()


def break_off(sides: SimSides, key: ReqKey) -> None:
    """A transfer breaks at this node."""
    if sides.sender.transfers.get(key) is not None:
        sides.sender.cancel(key, "the link broke (prefill node)")
    sides.receiver.refused(key, "the link broke (decode node)")


class WatchedFleet(SimFleet):
    """`on_launch` and `on_step` are told of every forward and every step, `forward_fault` is that of a forward."""

    node_type = WatchedNode
    transport_type = FaultyTransport
    transport: FaultyTransport
    nodes: dict[str, WatchedNode]  # type: ignore[assignment]

    def __init__(
        self,
        shape: FleetShape,
        costs: CostModel,
        *,
        seed: int = 0,
        on_launch: OnLaunch | None = None,
        on_step: OnStep | None = None,
        audits: bool = False,
        forward_fault: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self._on_launch, self._on_step, self._audits = on_launch, on_step, audits
        self._forward_fault = forward_fault
        super().__init__(shape, costs)
        self.transport.rng = random.Random(seed)

    def start(self, name: str, role: Role) -> WatchedNode:
        node = super().start(name, role)
        assert isinstance(node, WatchedNode)
        node.on_step, node.vitals.audits = self._on_step, self._audits
        node.stream.rng, node.stream.fail = self.random, self._forward_fault
        if (on_launch := self._on_launch) is not None:
            node.stream.on_launch = lambda batch: on_launch(node, batch)
        return node

    def _on_message(self, node: SimNode, message: Any) -> None:
        if getattr(node, "alive", True):
            super()._on_message(node, message)

    def kill(self, name: str) -> None:
        """A node dies; the router and its peers notice a little later."""
        node = self.nodes.pop(name)
        node.alive = False
        self.transport.kill(name)
        self.loop.at(self.loop.now + self.random.uniform(*NOTICE_S), self._lost, node)

    def _lost(self, node: SimNode) -> None:
        if node in self.live.of[node.role]:
            self.live.of[node.role].remove(node)
        self.dispatcher.on_node_lost(node, "killed", Loss.CRASHED)
