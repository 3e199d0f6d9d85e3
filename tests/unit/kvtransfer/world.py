"""Scripted prefill and decode nodes around the real KVSender and KVReceiver, over the fake network.

They check what no unit test sees alone: who owns a page at each gather and scatter, that freed pages keep the
poison that was put in them, and that every opened key ends exactly once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.config import TransferOptions
from shared.kvcache.pools import TokenToKVPool
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import Received, SendEnded
from shared.protocol.messages import KVLayout, NodeRef, Outbox, ReqKey
from shared.protocol.transfer_messages import Handoff, Ready
from tests.fake_link import fake_transports
from tests.fake_network import FakeNetwork, Faults
from tests.unit.kvtransfer.looks import num_slots_out

LAYOUT = KVLayout("f00d", "float32", 4, 3, 1, 2)
PAGE_SIZE, NUM_LAYERS = LAYOUT.page_size, LAYOUT.num_layers
UNIT_NBYTES = 2 * 4 * 2 * 4  # K and V of one page of one layer
POISON = 77777.0

FAST = TransferOptions(
    slot_nbytes=2 * UNIT_NBYTES,  # a page of all three layers exceeds a slot
    num_slots=3,
    ready_timeout_s=3.0,
    connect_timeout_s=1.5,
    offer_timeout_s=5.0,
    transfer_timeout_s=3.0,
    lease_s=1.5,
    park_s=2.0,
    tombstone_s=30.0,
    ping_s=0.2,
    peer_timeout_s=0.8,
    rebuild_min_s=0.05,
    rebuild_max_s=0.4,
    hello_retry_s=1.5,
    forget_peer_s=4.0,
    op_timeout_s=0.5,
    build_timeout_s=0.5,
)
SETTLE_S = 12.0
"""Longer than every deadline of FAST that may follow another."""


_incarnations = itertools.count(1)


class GuardedPages:
    """A pool that knows which pages may be read or written now."""

    def __init__(self, num_pages: int) -> None:
        self.pool = TokenToKVPool(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_layers=NUM_LAYERS,
            num_kv_heads=LAYOUT.num_kv_heads,
            head_dim=LAYOUT.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.free = list(range(1, num_pages))
        self.open_to_transfer: set[int] = set()
        self.violations: list[str] = []
        self.num_pages = num_pages
        self.in_the_middle: Callable[[], None] = lambda: None
        """Runs in the middle of every gather and scatter, as another thread would."""
        self.num_gathers = self.num_scatters = 0
        self.pool.buffer_LSNHPD.fill_(POISON)

    def alloc(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Poison, so that a late write shows in `audit`, and a late read in the receiver's bytes."""
        self.open_to_transfer -= set(pages)
        self.pool.buffer_LSNHPD[:, :, list(pages)] = POISON
        self.free.extend(pages)

    def audit(self) -> None:
        assert not self.violations, self.violations
        assert sorted(self.free) == list(range(1, self.num_pages)), "pages did not come home"
        assert (self.pool.buffer_LSNHPD == POISON).all(), "a free page was written"

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return self.pool.gather_nbytes(num_pages, num_layers)

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        self.num_gathers += 1
        self.in_the_middle()
        digest = self.pool.gather(page_ids, first_layer, num_layers, out, seed)
        self._check("gather", page_ids)
        return digest

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        self.num_scatters += 1
        self.in_the_middle()
        digest = self.pool.scatter(page_ids, first_layer, num_layers, src, seed)
        self._check("scatter", page_ids)
        return digest

    def _check(self, what: str, page_ids: Sequence[int]) -> None:
        if not set(page_ids) <= self.open_to_transfer:
            self.violations.append(f"{what} of pages that the transfer does not own: {page_ids}")


def fill(pages: GuardedPages, page_id: int, key: ReqKey, sequence_page: int) -> None:
    """What the prefill of `key` computes for one page of the sequence."""
    pages.pool.buffer_LSNHPD[:, :, page_id] = content(key, sequence_page)


def content(key: ReqKey, sequence_page: int) -> torch.Tensor:
    seed = int(key.rid) * 1000 + sequence_page
    return (
        torch.arange(NUM_LAYERS * 2 * 8, dtype=torch.float32).view(NUM_LAYERS, 2, 1, PAGE_SIZE, 2) + seed * 64
    )


def handoff(key: ReqKey, total_pages: int) -> Handoff:
    return Handoff(
        key, total_pages, (5,), max(0, total_pages * PAGE_SIZE - 1) if total_pages else 0, 9, 0, ()
    )


@dataclass
class Held:
    key: ReqKey
    peer: str
    total_pages: int
    page_ids: list[int] = field(default_factory=list)
    """On the prefill node all pages of the sequence; on the decode node those after the prefix."""
    prefix_pages: int | None = None
    next_page: int = 0
    handed_off: bool = False


class Host:
    """A node, its pages, and what it knows of its transfers."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.pages = GuardedPages(160)
        self.live: dict[ReqKey, Held] = {}
        self.ended: dict[ReqKey, Any] = {}
        self.num_wakes = 0

    def endpoint(self, outbox: Outbox, options: TransferOptions, layout: KVLayout) -> Endpoint:
        return Endpoint(
            node=NodeRef(self.name, f"{self.name}.{next(_incarnations)}", f"fake://{self.name}"),
            layout=layout,
            pages=self.pages,
            outbox=outbox,
            transports=fake_transports(self.network, self.name, options),
            clock=self.network.clock,
            options=options,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.num_wakes += 1


class PrefillHost(Host):
    """A prefill node whose forward computes `rate` pages of each sequence a step."""

    def __init__(
        self, network: FakeNetwork, name: str, options: TransferOptions, layout: KVLayout = LAYOUT
    ) -> None:
        super().__init__(network, name)
        self.rate = 2
        outbox = network.join(
            name,
            lambda sender, message: self.side.on_message(sender, message),
            on_connected=lambda peer: self.side.on_connected(peer),
            on_disconnected=lambda peer, reason: self.side.on_disconnected(peer, reason),
        )
        self.side = KVSender(self.endpoint(outbox, options, layout))

    def open(self, key: ReqKey, peer: str, total_pages: int) -> bool:
        pages = self.pages.alloc(total_pages)
        if pages is None:
            return False
        self.live[key] = Held(key, peer, total_pages, pages)
        self.side.open(key, peer)
        return True

    def step(self) -> None:
        self.side.tick()
        for event in self.side.poll():
            match event:
                case Ready():
                    sequence = self.live[event.key]
                    assert sequence.prefix_pages is None, "Ready twice"
                    transfer = self.side.transfers.get(event.key)
                    if transfer is None:
                        assert self.side.transfers.ended(event.key) is not None
                    else:
                        assert transfer.prefix_pages == event.prefix_pages
                    sequence.prefix_pages = sequence.next_page = event.prefix_pages
                case SendEnded():
                    assert event.key not in self.ended, "ended twice"
                    self.ended[event.key] = event
                    self.pages.release(self.live.pop(event.key).page_ids)
        for sequence in self.live.values():
            self._compute(sequence)

    def _compute(self, sequence: Held) -> None:
        if sequence.prefix_pages is None or sequence.handed_off:
            return
        first, end = sequence.next_page, min(sequence.next_page + self.rate, sequence.total_pages)
        ids = sequence.page_ids[first:end]
        for index, page_id in enumerate(ids):
            fill(self.pages, page_id, sequence.key, first + index)
        self.pages.open_to_transfer |= set(ids)
        self.side.offer(sequence.key, ids)
        sequence.next_page = end
        if end == sequence.total_pages:
            self.side.handoff(sequence.key, handoff(sequence.key, sequence.total_pages))
            sequence.handed_off = True


class DecodeHost(Host):
    """A decode node that checks every byte of what it received."""

    def __init__(
        self, network: FakeNetwork, name: str, options: TransferOptions, layout: KVLayout = LAYOUT
    ) -> None:
        super().__init__(network, name)
        outbox = network.join(name, lambda sender, message: self.side.on_message(sender, message))
        self.side = KVReceiver(self.endpoint(outbox, options, layout))
        network.every(self.side.renewal_s, self.side.renew_leases, owner=name)

    def open(
        self,
        key: ReqKey,
        peer: str,
        total_pages: int,
        prefix_pages: int,
        spare: int = 0,
        num_known: int | None = None,
    ) -> bool:
        pages = self.pages.alloc(total_pages - prefix_pages + spare)
        if pages is None:
            return False
        self.pages.open_to_transfer |= set(pages)
        self.live[key] = Held(key, peer, total_pages, pages, prefix_pages)
        self.side.open(key, peer, pages, prefix_pages, num_known)
        return True

    def step(self) -> None:
        self.side.tick()
        for event in self.side.poll():
            assert event.key not in self.ended, "ended twice"
            self.ended[event.key] = event
            sequence = self.live.pop(event.key)
            if isinstance(event, Received):
                self._verify(sequence, event)
            self.pages.release(sequence.page_ids)

    def _verify(self, sequence: Held, event: Received) -> None:
        assert sequence.prefix_pages is not None
        assert event.pages == sequence.total_pages - sequence.prefix_pages
        assert event.nbytes == event.pages * NUM_LAYERS * UNIT_NBYTES
        for index in range(event.pages):
            got = self.pages.pool.buffer_LSNHPD[:, :, sequence.page_ids[index]]
            expected = content(sequence.key, sequence.prefix_pages + index)
            assert torch.equal(got, expected), f"page {index} of {sequence.key} differs"


class World:
    """Some prefill and decode hosts on one network. Hosts that were killed are checked no more."""

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        options: TransferOptions = FAST,
        prefills: Sequence[str] = ("p0",),
        decodes: Sequence[str] = ("d0",),
    ) -> None:
        self.network = FakeNetwork(seed, faults=faults)
        self.options = options
        self.crashes = _Crashes()
        self.prefills = {name: PrefillHost(self.network, name, options) for name in prefills}
        self.decodes = {name: DecodeHost(self.network, name, options) for name in decodes}
        for prefill in prefills:
            for decode in decodes:
                self.network.connect(prefill, decode)

    @property
    def p(self) -> PrefillHost:
        return self.prefills["p0"]

    @property
    def d(self) -> DecodeHost:
        return self.decodes["d0"]

    @property
    def hosts(self) -> list[PrefillHost | DecodeHost]:
        return [*self.prefills.values(), *self.decodes.values()]

    def run(self, seconds: float, dt: float = 0.01) -> None:
        for _ in range(max(1, round(seconds / dt))):
            self.network.advance(dt)
            for host in self.hosts:
                host.step()

    def restart(self, name: str) -> None:
        """SIGKILL, and a new process of the same name."""
        self.network.kill(name)
        if name in self.prefills:
            self.prefills[name] = PrefillHost(self.network, name, self.options)
        else:
            self.decodes[name] = DecodeHost(self.network, name, self.options)
        for prefill in self.prefills:
            for decode in self.decodes:
                if name in (prefill, decode):
                    self.network.connect(prefill, decode)

    def settle(self) -> None:
        """Wait until all deadlines have passed, then `check_home`."""
        self.run(SETTLE_S, dt=0.05)
        self.check_home()

    def check_home(self) -> None:
        """Nothing is left over anywhere."""
        for host in self.hosts:
            assert not host.live, f"{host.name} never ended {list(host.live)}"
            assert not [*host.side.transfers]
            assert num_slots_out(host.side) == 0, "a staging slot is not home"
            host.pages.audit()
        self.crashes.check()

    def close(self) -> None:
        for host in self.hosts:
            host.side.close()
        self.crashes.close()


class _Crashes(logging.Handler):
    """A data thread survives a defect, so that one is found in the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []
        logging.getLogger("baton").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))

    def check(self) -> None:
        assert not self.records, "\n".join(self.records)

    def close(self) -> None:
        logging.getLogger("baton").removeHandler(self)
        super().close()


def key(number: int, attempt: int = 0) -> ReqKey:
    return ReqKey("router", str(number), attempt)
