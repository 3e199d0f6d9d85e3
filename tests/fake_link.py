"""Data links of the fake network: as unforgiving as gloo, and as slow to let go.

A chunk that arrives before its receive was posted, or at another length, is an AssertionError: on gloo it would
take another chunk's place or abort the process. Buffers are read and written at the moment of arrival, so a slot
that is reused too early shows. When a party dies, ops of its peer may stay until their timeout and write garbage
into their slots meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shared.config import TransferOptions
from shared.errors import LinkError
from shared.kvtransfer.link import Copier, Link, LinkSpec, Stepped
from shared.kvtransfer.staging import Slot, SlotRing
from shared.kvtransfer.transports.choice import HOST_SLOT_NBYTES, Transports
from shared.kvtransfer.transports.common import RingArrival, receive_into
from shared.protocol.transfer_messages import Place
from tests.fake_network import FakeNetwork


class LinkMemory(Protocol):
    """Where staging slots lie."""

    def new_slot(self, nbytes: int) -> Slot:
        """Memory that ops may use at once."""
        ...

    def address_of(self, buffer: torch.Tensor) -> Any:
        """What an op reads and writes, whatever becomes of `buffer`: `buffer` itself, or what works like it."""
        ...


class HostMemory:
    """Slots that a test can look into."""

    def new_slot(self, nbytes: int) -> Slot:
        return Slot(torch.zeros(nbytes, dtype=torch.uint8))

    def address_of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


def fake_transports(network: FakeNetwork, party: str, options: TransferOptions) -> Transports:
    """The data links of a party that has joined."""
    factory = FakeLinkFactory(network, party, options, HostMemory())
    slot_nbytes = options.slot_nbytes or HOST_SLOT_NBYTES
    return Transports({"fake": factory}, FakeLinkRunner(network, party), slot_nbytes=slot_nbytes)


@dataclass(frozen=True)
class FakeLinkRunner:
    """The network steps the links of one party. Copies are made at once."""

    network: FakeNetwork
    party: str

    def drive(self, name: str, link: Stepped) -> Callable[[float], bool]:
        self.network.add_loop(self.party, link)

        def join(timeout_s: float) -> bool:
            """What can be done without time passing is done."""
            while not link.finished and link.step(block=False):
                pass
            return link.finished

        return join

    def new_copier(self, name: str) -> Copier:
        return _InlineCopier()


class FakeLinkFactory:
    """Links of one party."""

    def __init__(
        self, network: FakeNetwork, party: str, options: TransferOptions, memory: LinkMemory
    ) -> None:
        self._network = network
        self._party = party
        self._options = options
        self._memory = memory

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return None

    def new_slot(self, nbytes: int) -> Slot:
        return self._memory.new_slot(nbytes)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        """Both ends meet through the store, so lost control messages delay or prevent it."""
        network, now = self._network, self._network.clock.now
        wire = network.wires.setdefault(spec.name, Wire(network, spec.name, self._options.op_timeout_s))
        deadline = wire.deadlines.get(spec.rank)
        if deadline is None:
            deadline = now + self._options.build_timeout_s
            wire.deadlines[spec.rank] = deadline
            wire.secrets[spec.rank] = spec.secret
            network.schedule_for(self._party, deadline, _nothing)
            spec.store.set(f"fake/{spec.rank}", b"here")
        if wire.broken:
            raise LinkError(f"building link {spec.name}: the peer is gone")
        if spec.store.check([f"fake/{1 - spec.rank}"]):
            if wire.secrets[0] != wire.secrets[1]:
                raise LinkError(f"the peer of link {spec.name} failed the challenge")
            link = FakeLink(wire, self._party, spec.rank, spec.ring, self._memory, on_dead)
            wire.ends[spec.rank] = link
            # The peer builds its end by its deadline or never. Then its socket is closed.
            network.schedule_for(self._party, wire.deadlines[1 - spec.rank], link.check_peer)
            return link
        if now >= deadline:
            raise LinkError(f"building link {spec.name}: the peer did not come in time")
        return None


class Wire:
    """What both ends of one link share."""

    def __init__(self, network: FakeNetwork, name: str, op_timeout_s: float) -> None:
        self.network = network
        self.name = name
        self.op_timeout_s = op_timeout_s
        self.deadlines: dict[int, float] = {}
        self.secrets: dict[int, bytes] = {}
        self.ends: dict[int, FakeLink] = {}
        self.broken = False
        self.last_arrival = 0.0

    def party_died(self, party: str) -> None:
        """If it is one of the ends, break."""
        if any(end.party == party for end in self.ends.values()):
            self.break_off("connection reset", but_not=party)

    def break_off(self, reason: str, *, but_not: str) -> None:
        """Nothing arrives any more; the end of the other party notices after a while."""
        if self.broken:
            return
        self.broken = True
        for end in self.ends.values():
            if end.party != but_not:
                end.peer_gone(reason)


class FakeLink:
    """One end."""

    def __init__(
        self,
        wire: Wire,
        party: str,
        rank: int,
        ring: SlotRing,
        memory: LinkMemory,
        on_dead: Callable[[str], None],
    ) -> None:
        self.wire = wire
        self.party = party
        self.receives: dict[int, tuple[FakeOp, Slot]] = {}
        self._rank = rank
        self._ring = ring
        self._memory = memory
        self.max_arrivals = ring.num_slots
        self._on_dead = on_dead
        self._ops: list[FakeOp] = []
        self._aborted = False
        self._closed = False

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> FakeOp:
        op = self._start(slot.payload(nbytes))
        wire, network = self.wire, self.wire.network
        peer = wire.ends.get(1 - self._rank)
        network.require(peer is not None, "a chunk was granted on a link that the receiver has not built")
        assert peer is not None
        wire.last_arrival = max(wire.last_arrival, network.clock.now + network.draw_link_delay())
        network.schedule_for(peer.party, wire.last_arrival, lambda: self._arrive(op, header, peer, seq))
        return op

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        return receive_into(self._ring, lambda slot: self._receive(slot, nbytes, seq))

    def abort(self) -> None:
        network = self.wire.network
        for op in self._ops:
            if network.faults.outlive_timeout and not self._aborted and not op.done:
                op.buffer.fill_(0xEE)
            op.leave("aborted", at=network.clock.now)
        self._aborted = True
        self.wire.break_off("closed by the peer", but_not=self.party)

    def close(self) -> None:
        self.wire.network.require(all(op.left for op in self._ops), "closed with an op under way")
        self._closed = True
        self.abort()
        self._ops.clear()
        self.receives.clear()

    def peer_gone(self, reason: str) -> None:
        """The other end is dead: the canary notices soon, an op perhaps only at its timeout."""
        network = self.wire.network
        noticed = network.clock.now + network.draw_notice()
        network.schedule_for(self.party, noticed, self._canary)
        for op in self._ops:
            if op.left:
                continue
            stuck = network.random.random() < network.faults.stuck_op
            op.leave(reason, at=op.deadline if stuck else noticed)
            network.schedule_for(
                self.party, network.random.uniform(network.clock.now, op.deadline), op.scribble
            )

    def check_peer(self) -> None:
        """The other end is built by now, or has given the link up."""
        if 1 - self._rank not in self.wire.ends:
            self._canary()

    def _canary(self) -> None:
        if not self._closed:
            self._on_dead("the peer is gone")

    def _receive(self, slot: Slot, nbytes: int, seq: int) -> FakeOp:
        op = self._start(slot.payload(nbytes))
        self.receives[seq] = op, slot
        return op

    def _start(self, buffer: torch.Tensor) -> FakeOp:
        if self.wire.broken:
            raise LinkError("connection reset")
        network = self.wire.network
        op = FakeOp(network, self._memory.address_of(buffer), network.clock.now + self.wire.op_timeout_s)
        network.schedule_for(self.party, op.deadline, _nothing)
        self._ops = [op for op in self._ops if not op.done]
        self._ops.append(op)
        return op

    def _arrive(self, op: FakeOp, header: bytes, peer: FakeLink, seq: int) -> None:
        if self.wire.broken or op.left:
            return
        network = self.wire.network
        network.require(seq in peer.receives, f"message {seq} arrived before its receive was posted")
        receive, slot = peer.receives.pop(seq)
        if receive.left:
            return
        network.require(
            receive.buffer.numel() == op.buffer.numel(), "a send and its receive differ in length"
        )
        receive.buffer.copy_(op.buffer)
        slot.header = header
        if network.num_payloads_to_spare > 0:
            network.num_payloads_to_spare -= 1
        elif network.num_payloads_to_corrupt > 0:
            network.num_payloads_to_corrupt -= 1
            receive.buffer[network.random.randrange(op.buffer.numel())] ^= 0x01
        op.done = receive.done = True


@dataclass(slots=True)
class FakeOp:
    """A send or receive: under way until it is done, or until the time comes when it leaves with a failure."""

    network: FakeNetwork
    buffer: Any
    deadline: float
    done: bool = False
    _leaves_at: float | None = None
    _reason: str = "timed out"

    @property
    def left(self) -> bool:
        """Nothing reads or writes the buffer any more."""
        at = self.deadline if self._leaves_at is None else self._leaves_at
        return self.done or self.network.clock.now >= at

    def leave(self, reason: str, *, at: float) -> None:
        """Fail at a time, if nothing happens before."""
        if not self.left:
            self._leaves_at, self._reason = at, reason

    def scribble(self) -> None:
        """What a message that was cut short may leave in the buffer."""
        if not self.left:
            self.buffer.fill_(0xEE)

    def wait(self, *, block: bool) -> bool:
        assert not block, "nothing blocks under a virtual clock"
        if self.done:
            return True
        if self.left:
            raise LinkError(self._reason)
        return False


class _InlineCopier:
    """Copies at once."""

    def submit(self, copy: Callable[[], None], /) -> None:
        copy()

    def shutdown(self, wait: bool = True) -> None:
        return


def _nothing() -> None:
    """An event after which loops look at their deadlines."""
