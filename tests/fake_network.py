"""A network in one thread, under a virtual clock and a seed: the transport of deterministic tests and simulations.

    network = FakeNetwork(seed=1, faults=Faults(drop=0.01))
    outbox = network.join("p0", on_message=handler, on_disconnected=...)
    KVSender(..., outbox=outbox, transports=fake_transports(network, "p0", options), clock=network.clock, ...)
    network.connect("p0", "d0")
    network.advance(0.5)

Parties exchange any messages of shared.protocol. Messages of one party to another arrive in the order in which
they were sent, unless `Faults.reorder` or `hold` says otherwise; nothing orders different senders. Data links
(`fake_link`) run the same loops as threads do. The same seed and calls give the same run.

A party that was killed may join again under its name: what was on its way to its former self is lost.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from shared.kvtransfer.link import Stepped
from shared.protocol.messages import Announcement, NodeToRouter, Outbox, RouterToNode, Struct
from shared.protocol.transfer_messages import ReceiverToSender, SenderToReceiver

AnyMessage = RouterToNode | NodeToRouter | Announcement | SenderToReceiver | ReceiverToSender

AnyMessageType = TypeVar("AnyMessageType", bound=Struct)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class VirtualClock:
    """Seconds that pass only when the network says so."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        """The time now."""
        return self.now


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong by itself. Pairs are (least, most) seconds, drawn anew each time; the rest, probabilities."""

    delay_s: tuple[float, float] = (0.0001, 0.002)
    """Of each control message."""
    link_delay_s: tuple[float, float] = (0.0001, 0.002)
    """Of each chunk on a data link."""
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """Of a message overtaking others between the same two parties, which no real transport does."""
    notice_s: tuple[float, float] = (0.005, 0.05)
    """After a death: until control connections report it, and until canaries do."""
    stuck_op: float = 0.5
    """Of an op leaving only at its own timeout after its peer has died, and writing garbage before."""
    outlive_timeout: bool = False
    """Ops that have timed out use their memory until their link is aborted, as kernels of NCCL do."""
    silent_kill: bool = False
    """Deaths are not reported by the control connection; only pings tell."""


@dataclass(slots=True)
class _Party:
    name: str
    on_message: Callable[[str, Any], None]
    on_connected: Callable[[str], None] | None
    on_disconnected: Callable[[str, str], None] | None
    alive: bool = True
    stopped: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)
    loops: list[Stepped] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)


@dataclass(order=True, slots=True)
class _Event:
    time: float
    number: int
    run: Callable[[], None] = field(compare=False)
    owner: _Party | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class _FakeOutbox:
    network: FakeNetwork
    party: _Party

    def send(self, to: str, message: Struct) -> None:
        self.network._send(self.party, to, message)


class FakeNetwork:
    """Connects parties in memory. Every message passes through its encoding, as on a socket."""

    def __init__(
        self,
        seed: int = 0,
        clock: VirtualClock | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.wires: dict[str, Any] = {}
        """The data links by name, each a `fake_link.Wire`."""
        self.num_sent: Counter[str] = Counter()
        """Messages by the name of their type, those that were dropped included."""
        self.defects: list[str] = []
        """What a data link would not have survived; `advance` raises the first."""
        self.num_payloads_to_corrupt = self.num_payloads_to_spare = 0
        self._parties: dict[str, _Party] = {}
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._last_arrival: dict[tuple[str, str], float] = defaultdict(float)
        self._drops: Counter[type[Struct]] = Counter()
        self._delays: dict[type[Struct], float] = {}
        self._connections: Counter[frozenset[str]] = Counter()
        self._held: dict[type[Struct], list[tuple[_Party, _Party | None, AnyMessage]]] = {}

    # ------------------------------------------------------------------------------------- parties
    def join(
        self,
        name: str,
        on_message: Callable[[str, Any], None],
        *,
        on_connected: Callable[[str], None] | None = None,
        on_disconnected: Callable[[str, str], None] | None = None,
    ) -> Outbox:
        """A new party, or the next incarnation of one that was killed. Returns where it sends from."""
        old = self._parties.get(name)
        assert old is None or not old.alive, f"{name} is already here"
        party = _Party(name, on_message, on_connected, on_disconnected)
        self._parties[name] = party
        return _FakeOutbox(self, party)

    def connect(self, dialler: str, listener: str) -> None:
        """`dialler` connects: it is told so at once; both are told when the connection ends.

        The end of an earlier connection that was not told yet is not told any more.
        """
        a, b = self._parties[dialler], self._parties[listener]
        self._connections[frozenset((dialler, listener))] += 1
        a.peers.add(listener)
        b.peers.add(dialler)
        if a.on_connected is not None:
            a.on_connected(listener)

    def disconnect(self, one: str, other: str, reason: str = "connection reset") -> None:
        """The control connection breaks; what is on its way is lost."""
        for name, peer in ((one, other), (other, one)):
            self._last_arrival.pop((name, peer), None)
            party = self._parties[name]
            if peer in party.peers:
                party.peers.discard(peer)
                self._notify_disconnected(party, peer, reason, at=self.clock.now)

    def kill(self, name: str) -> None:
        """End a party at once, as SIGKILL does."""
        party = self._parties[name]
        party.alive = False
        party.loops.clear()
        for wire in list(self.wires.values()):
            wire.party_died(name)
        for peer in party.peers:
            other = self._parties[peer]
            other.peers.discard(name)
            if not self.faults.silent_kill:
                at = max(self.clock.now + self._draw(self.faults.notice_s), self._last_arrival[name, peer])
                self._notify_disconnected(other, name, "connection closed by the peer", at=at)
        party.peers.clear()

    def stop(self, name: str) -> None:
        """Freeze a party, as SIGSTOP does: what is sent to it waits."""
        self._parties[name].stopped = True

    def resume(self, name: str) -> None:
        """Let a stopped party go on."""
        party = self._parties[name]
        party.stopped = False
        backlog, party.backlog = party.backlog, []
        for run in backlog:
            self.call_later(0.0, run, owner=name)

    # -------------------------------------------------------------------------- faults, by construction
    def drop_next(self, message_type: type[Struct], count: int = 1) -> None:
        """Lose the next `count` messages of this type."""
        self._drops[message_type] += count

    def delay(self, message_type: type[Struct], seconds: float) -> None:
        """Delay all further messages of this type (and, to keep their order, what is sent after them). 0 ends it."""
        self._delays[message_type] = seconds

    def hold(self, message_type: type[Struct]) -> None:
        """Keep messages of this type back until `release`; others overtake them."""
        self._held.setdefault(message_type, [])

    def release(self, message_type: type[Struct]) -> None:
        """Send what `hold` kept back, and hold no more."""
        for sender, receiver, message in self._held.pop(message_type, []):
            self._deliver_later(sender, receiver, message)

    def release_all(self) -> None:
        """Hold no messages of any type back any more."""
        for message_type in list(self._held):
            self.release(message_type)

    def end_faults(self) -> None:
        """Be well from now on."""
        self.faults, self.num_payloads_to_corrupt = Faults(), 0
        self._drops.clear()
        self._delays.clear()

    def take_held(self, message_type: type[AnyMessageType]) -> AnyMessageType:
        """The oldest message of this type that `hold` keeps back; it is not delivered any more."""
        message = self._held[message_type].pop(0)[2]
        assert isinstance(message, message_type)
        return message

    def num_held(self, message_type: type[Struct]) -> int:
        """Messages of this type that `hold` keeps back."""
        return len(self._held.get(message_type, ()))

    def corrupt_payloads(self, count: int = 1, *, after: int = 0) -> None:
        """Flip a byte of `count` chunks on their way, after the digest was computed. The next `after` are spared."""
        self.num_payloads_to_spare = after
        self.num_payloads_to_corrupt += count

    # ---------------------------------------------------------------------------------------- time
    def call_later(self, seconds: float, run: Callable[[], None], *, owner: str | None = None) -> None:
        """Run something at a later time: never if `owner` was killed by then, later if it is stopped."""
        self._schedule(self.clock.now + seconds, run, self._parties[owner] if owner else None)

    def every(self, seconds: float, run: Callable[[], None], *, owner: str) -> None:
        """Run something of a party again and again, as a timer of its control thread does."""
        party = self._parties[owner]

        def run_and_go_on() -> None:
            run()
            self._schedule(self.clock.now + seconds, run_and_go_on, party)

        self._schedule(self.clock.now + seconds, run_and_go_on, party)

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that happens in it."""
        end = self.clock.now + seconds
        self._step_loops()
        while self._events and self._events[0].time <= end:
            self._run_next()
        self.clock.now = max(self.clock.now, end)
        self._step_loops()
        self._raise_defect()

    # ------------------------------------------------------------------------- for the data links only
    def schedule_for(self, name: str, at: float, run: Callable[[], None]) -> None:
        """Run something of a party at a time."""
        self._schedule(at, run, self._parties[name])

    def draw_link_delay(self) -> float:
        """How long a chunk takes."""
        return self._draw(self.faults.link_delay_s)

    def draw_notice(self) -> float:
        """How long it takes until a canary notices a death."""
        return self._draw(self.faults.notice_s)

    def require(self, condition: bool, otherwise: str) -> None:
        """Raise here and, since data threads survive their defects, once more where the test looks."""
        if not condition:
            self.defects.append(otherwise)
            raise AssertionError(otherwise)

    def add_loop(self, name: str, loop: Stepped) -> None:
        """Step `loop` from now on, while its party lives."""
        self._parties[name].loops.append(loop)

    # ------------------------------------------------------------------------------------- internal
    def _send(self, sender: _Party, to: str, message: Struct) -> None:
        if not sender.alive:
            return
        kind, receiver = type(message), self._parties.get(to)
        self.num_sent[kind.__name__] += 1
        decoded: AnyMessage = _decoder.decode(_encoder.encode(message))
        if self._drops[kind] > 0:
            self._drops[kind] -= 1
        elif kind in self._held:
            self._held[kind].append((sender, receiver, decoded))
        elif self.random.random() >= self.faults.drop:
            self._deliver_later(sender, receiver, decoded)
            if self.random.random() < self.faults.duplicate:
                self._deliver_later(sender, receiver, decoded)

    def _deliver_later(self, sender: _Party, receiver: _Party | None, message: AnyMessage) -> None:
        if receiver is None or not receiver.alive:
            return
        at = self.clock.now + self._draw(self.faults.delay_s) + self._delays.get(type(message), 0.0)
        pair = (sender.name, receiver.name)
        if self.random.random() >= self.faults.reorder:
            at = max(at, self._last_arrival[pair])
            self._last_arrival[pair] = at
        self._schedule(at, lambda: receiver.on_message(sender.name, message), receiver)

    def _notify_disconnected(self, party: _Party, peer: str, reason: str, *, at: float) -> None:
        pair = frozenset((party.name, peer))
        connection = self._connections[pair]

        def notify() -> None:
            if party.on_disconnected is not None and self._connections[pair] == connection:
                party.on_disconnected(peer, reason)

        self._schedule(at, notify, party)

    def _schedule(self, at: float, run: Callable[[], None], owner: _Party | None) -> None:
        heapq.heappush(self._events, _Event(at, next(self._numbers), run, owner))

    def _run_next(self) -> None:
        event = heapq.heappop(self._events)
        self.clock.now = max(self.clock.now, event.time)
        owner = event.owner
        if owner is not None and not owner.alive:
            return
        if owner is not None and owner.stopped:
            owner.backlog.append(event.run)
            return
        event.run()
        self._step_loops()

    def _step_loops(self) -> None:
        for party in list(self._parties.values()):
            if party.alive and not party.stopped and party.loops:
                for loop in list(party.loops):
                    while not loop.finished and loop.step(block=False):
                        pass
                party.loops = [loop for loop in party.loops if not loop.finished]

    def _raise_defect(self) -> None:
        if self.defects:
            raise AssertionError(self.defects.pop(0))

    def _draw(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)
