"""The wires of the simulation: the real KVSender and KVReceiver of every node, over links that carry no bytes.

    SimNode.sides ──messages──▶ Transport ──after their latency──▶ the other side
          └───── SimLink ──────▶ both network cards, when it is their turn ──▶ the peer's SimLink

What transfers and links are, grants and staging slots included, is the code that serves. The time of pages covers the
messages of their link (offers, grants), since it is measured from the offer until all pages have come. A node's
network card sends, and receives, one range of pages at a time, first come first served. Nothing falls silent here, so
leases and the deadlines of a transfer that is under way are not simulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.simulator.events import EventLoop, NodeClock
from shared.config import TransferOptions
from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link import Copier, Link, LinkSpec, Stepped
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.choice import Transports
from shared.kvtransfer.transports.common import RingArrival, receive_into
from shared.protocol.messages import KVLayout, NodeRef
from shared.protocol.transfer_messages import CancelTransfer, Done, Handoff, Place, Ready

OPTIONS = TransferOptions(
    num_slots=1 << 20,  # offers queue at the cards, as chunks of real slots do, and not for a grant
    ready_timeout_s=math.inf,
    offer_timeout_s=math.inf,
    transfer_timeout_s=math.inf,
    lease_s=math.inf,
    ping_s=math.inf,
    peer_timeout_s=math.inf,
)
MAX_PAGES = 1 << 20
"""The most pages of a chunk, so many that an offer is always one chunk."""
TIMED = Ready | Handoff | Done | CancelTransfer
"""Messages that take their latency. Offers and the messages of a link take none: the time of pages covers them."""


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """Links between nodes."""

    bandwidth_bytes_s: float = 1.25e9
    """Of one node's card, in each direction: 10 Gbit/s."""
    latency_s: float = 0.0002
    """Of a message, in seconds."""
    pages_latency_s: float = 0.0002
    """Of pages, on top of their length."""


class Transport:
    """The wires between all nodes and routers. Messages of one party to another keep their order."""

    def __init__(self, loop: EventLoop, model: NetworkModel, page_nbytes: int) -> None:
        self.loop = loop
        self.model = model
        self.nbytes = 0
        self.page_nbytes = page_nbytes
        self.links: dict[str, dict[int, SimLink]] = {}
        """Both ends of each link, by its name and their rank."""
        self.sides: dict[str, SimSides] = {}
        """Of each node, by its name."""
        self._egress_free: dict[str, float] = defaultdict(float)
        self._ingress_free: dict[str, float] = defaultdict(float)
        self._egress_busy_s: dict[str, float] = defaultdict(float)
        self._ingress_busy_s: dict[str, float] = defaultdict(float)

    def deliver(self, at: float, sender: str, to: str, run: Callable[..., None], *args: object) -> None:
        """Call `run` when a message sent at `at` arrives, in order with the others of this pair."""
        self.loop.at(at + self.model.latency_s, run, *args)

    def send(self, at: float, sender: str, to: str, message: Any, *, by_sender: bool) -> None:
        """A message between two nodes, of the sending side of one to the receiving side of the other or back."""
        if isinstance(message, TIMED):
            self.deliver(at, sender, to, self.hand_over, sender, to, message, by_sender)
        else:
            self.loop.at(at, self.hand_over, sender, to, message, by_sender)

    def start_pages(self, sender: str, to: str, nbytes: int) -> tuple[float, float]:
        """Pages that leave now: when the cards will have sent them, and when they will be there."""
        start = max(self.loop.now, self._egress_free[sender], self._ingress_free[to])
        end = start + nbytes / self.model.bandwidth_bytes_s
        self._egress_free[sender] = self._ingress_free[to] = end
        self._egress_busy_s[sender] += end - start
        self._ingress_busy_s[to] += end - start
        return end, end + self.model.pages_latency_s

    @property
    def most_busy_s(self) -> float:
        """How long the busiest card has sent, or received."""
        return max((*self._egress_busy_s.values(), *self._ingress_busy_s.values()), default=0.0)

    def hand_over(self, sender: str, to: str, message: Any, by_sender: bool) -> None:
        """A message is there."""
        sides = self.sides[to]
        (sides.receiver if by_sender else sides.sender).on_message(sender, message)
        sides.step_links()


class SimSides:
    """Both sides of the transfer of one node, the data threads of its links, and its dials (a `TransferSides`)."""

    def __init__(
        self,
        node: NodeRef,
        layout: KVLayout,
        transport: Transport,
        clock: NodeClock,
        wake: Callable[[], None],
    ) -> None:
        self.name = node.incarnation
        self.peering = self
        self.unreachable: dict[str, str] = {}
        self._transport = transport
        self._stepped: dict[str, Stepped] = {}
        """Links by their names."""
        self._dialled: set[str] = set()

        def endpoint(*, by_sender: bool) -> Endpoint:
            return Endpoint(
                node=node,
                layout=layout,
                pages=_Pages(transport.page_nbytes),
                outbox=_Outbox(transport, self.name, clock, by_sender),
                transports=Transports({"sim": self}, self, slot_nbytes=MAX_PAGES * transport.page_nbytes),
                clock=clock,
                options=OPTIONS,
                wake=wake,
            )

        self.sender = KVSender(endpoint(by_sender=True))
        self.receiver = KVReceiver(endpoint(by_sender=False))
        transport.sides[self.name] = self

    # ----------------------------------------------------------------------------------------- Peering
    def set_peers(self, router: str, nodes: Sequence[NodeRef]) -> None:
        """A node dials those that it is to send to, when it first hears of that."""

    def ensure(self, node: NodeRef) -> None:
        """Dial a node, if it is there; the connection is there at once."""
        if node.incarnation not in self._dialled and node.incarnation in self._transport.sides:
            self._dialled.add(node.incarnation)
            self.sender.on_connected(node.incarnation)

    # ----------------------------------------------------------------------- LinkRunner, LinkFactory
    def drive(self, name: str, link: Stepped) -> Callable[[float], bool]:
        """Step a link whenever something has happened to it, or at this node."""
        self._stepped[name] = link
        self._transport.loop.at(self._transport.loop.now, self.step_link, name)
        return lambda timeout_s: True

    def new_copier(self, name: str) -> Copier:
        """One that copies at once."""
        return _Copier()

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        """None: any two nodes can have a link."""

    def new_slot(self, nbytes: int) -> Slot:
        """A size without memory."""
        return Slot(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        """This end of a link, once the other one is there too."""
        ends = self._transport.links.setdefault(spec.name, {})
        ends.setdefault(spec.rank, SimLink(self, self._transport, spec))
        other = ends.get(1 - spec.rank)
        if other is None:
            return None
        self._transport.loop.at(self._transport.loop.now, other.sides.step_link, spec.name)
        return ends[spec.rank]

    def step_links(self) -> None:
        """What the data threads do, until they wait."""
        for name in list(self._stepped):
            self.step_link(name)

    def step_link(self, name: str) -> None:
        """What the data thread of one link does, until it waits."""
        if (link := self._stepped.get(name)) is None:
            return
        while not link.finished and link.step(block=False):
            pass
        if link.finished:
            self._stepped.pop(name, None)


class SimLink:
    """One end of a link. A send leaves when the cards have sent it; its receive is done when it is there."""

    def __init__(self, sides: SimSides, transport: Transport, spec: LinkSpec) -> None:
        self.sides = sides
        self.max_arrivals = OPTIONS.num_slots
        self.is_aborted = False
        self._transport = transport
        self.name, self._peer_rank = spec.name, 1 - spec.rank
        self._ring = spec.ring
        self._receives: dict[int, tuple[_Op, Slot]] = {}

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> _Op:
        """Send pages, which take the time of both cards."""
        transport, peer, op = self._transport, self._transport.links[self.name][self._peer_rank], _Op(self)
        sent_at, there_at = transport.start_pages(self.sides.name, peer.sides.name, nbytes)
        transport.loop.at(sent_at, op.finish)
        transport.loop.at(there_at, self._arrive, peer, seq, header, nbytes)
        return op

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        """Wait for a message."""
        op = _Op(self)
        arrival = receive_into(self._ring, lambda slot: op)
        self._receives[seq] = op, arrival.slot
        return arrival

    def abort(self) -> None:
        """Nothing arrives any more, at either end."""
        self.is_aborted = True
        self._transport.links.pop(self.name, None)

    def close(self) -> None:
        """It has no threads and no descriptors."""

    def _arrive(self, peer: SimLink, seq: int, header: bytes, nbytes: int) -> None:
        there = self._transport.sides
        if not (self.is_aborted or peer.is_aborted) and {self.sides.name, peer.sides.name} <= there.keys():
            self._transport.nbytes += nbytes
            op, slot = peer._receives.pop(seq)
            slot.header = header
            op.finish()


class _Op:
    """A send or a receive."""

    def __init__(self, link: SimLink) -> None:
        self._link = link
        self._done = False

    def finish(self) -> None:
        """It has left, or come."""
        self._done = True
        self._link.sides.step_link(self._link.name)

    def wait(self, *, block: bool) -> bool:
        """Whether it has left, or come. LinkError: its link was aborted first."""
        if not self._done and self._link.is_aborted:
            raise LinkError("the link is gone")
        return self._done


@dataclass(frozen=True)
class _Outbox:
    """What one side of a node says to its peers."""

    transport: Transport
    name: str
    clock: NodeClock
    by_sender: bool

    def send(self, to: str, message: Any) -> None:
        self.transport.send(self.clock(), self.name, to, message, by_sender=self.by_sender)


@dataclass(frozen=True)
class _Pages:
    """Pages without content, so that all have one digest."""

    page_nbytes: int

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return num_pages * num_layers * self.page_nbytes

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        return 0

    scatter = gather


class _Copier:
    def submit(self, copy: Callable[[], None], /) -> None:
        copy()

    def shutdown(self, wait: bool = True) -> None:
        return
