"""Two nodes that both send and receive, over real control sockets and real links."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from shared.config import TransferOptions
from shared.kvtransfer.endpoint import PageStore
from shared.kvtransfer.peering import UNNAMED_IDLE_S
from shared.kvtransfer.states import Received
from shared.protocol.channel import ControlThread
from shared.protocol.messages import ReqKey
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import (
    BACKENDS,
    RealNode,
    key,
    num_descriptors,
    num_threads,
    real,
)
from tests.unit.kvtransfer.looks import num_live, num_slots_out

torch.set_num_threads(1)
NUM_PAGES = 64


class HeldPages:
    """A pool whose scatters wait until `go_on` is set."""

    def __init__(self, pages: PageStore) -> None:
        self._pages = pages
        self.gather, self.gather_nbytes = pages.gather, pages.gather_nbytes
        self.go_on = threading.Event()
        self.go_on.set()

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        assert self.go_on.wait(PATIENCE_S)
        return self._pages.scatter(page_ids, first_layer, num_layers, src, seed)


class Two:
    """Each sends its first half of pages, and receives into the second."""

    def __init__(self, options: TransferOptions, clock_of_a: Callable[[], float] = time.monotonic) -> None:
        self.a = RealNode("a", options, num_pages=NUM_PAGES, clock=clock_of_a)
        self.b = RealNode("b", options, num_pages=NUM_PAGES, wrap=HeldPages)
        for node in (self.a, self.b):
            node.pool.buffer_LSNHPD.normal_()
        self._numbers = itertools.count()

    def send(self, source: RealNode, target: RealNode, pages: list[int], to: list[int]) -> ReqKey:
        new = key(next(self._numbers))
        source.sides.peering.ensure(target.ref)
        source.to_send[new] = pages
        source.sender.open(new, target.ref.incarnation)
        target.receiver.open(new, source.ref.incarnation, to, 0)
        return new

    def until(self, condition: Callable[[], bool]) -> None:
        self.a.until(condition, self.b)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture(params=BACKENDS)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    two = Two(real(request.param))
    yield two
    two.close()


def test_pages_move_in_both_directions_at_once(two: Two) -> None:
    ours, theirs = list(range(1, 32)), list(range(32, 63))
    for _ in range(3):
        there = two.send(two.a, two.b, ours, theirs)
        back = two.send(two.b, two.a, ours, theirs)
        two.until(lambda: there in two.b.received and back in two.a.received)  # noqa: B023
        for node, new in ((two.b, there), (two.a, back)):
            assert isinstance(node.received[new], Received), node.received[new]
        two.until(lambda: there in two.a.sent and back in two.b.sent)  # noqa: B023
        assert two.a.sent[there].ok
        assert two.b.sent[back].ok
        for source, target in ((two.a, two.b), (two.b, two.a)):
            moved = target.pool.buffer_LSNHPD[:, :, theirs]
            assert torch.equal(moved, source.pool.buffer_LSNHPD[:, :, ours])
            source.pool.buffer_LSNHPD[:, :, ours] += 1


def test_a_link_that_is_lost_one_way_leaves_the_other_way_alone(two: Two) -> None:
    there, back = two.send(two.a, two.b, [1], [40]), two.send(two.b, two.a, [1], [40])
    two.until(lambda: there in two.b.received and back in two.a.received)
    two.a.sender.end_link_of(two.b.ref.incarnation, "test")
    back = two.send(two.b, two.a, [1, 2], [40, 41])
    two.until(lambda: back in two.a.received)
    assert isinstance(two.a.received[back], Received)
    assert two.a.receiver.num_links_opened == 1
    there = two.send(two.a, two.b, [1, 2], [40, 41])
    two.until(lambda: there in two.b.received and two.b.receiver.num_links_opened == 2)
    two.until(lambda: num_live(two.a.sender) == 1)


def test_a_link_that_is_not_used_is_closed_and_built_again_when_it_is(two: Two) -> None:
    there = two.send(two.a, two.b, [1], [40])
    two.until(lambda: there in two.b.received and there in two.a.sent)
    two.a.sides.peering._peers[two.b.ref.incarnation].used_at -= UNNAMED_IDLE_S
    two.until(lambda: not two.a.sides.peering._peers)
    two.until(lambda: num_live(two.a.sender) == num_live(two.b.receiver) == 0)
    two.until(lambda: two.a.ref.incarnation not in two.b.receiver._peers)
    assert two.b.receiver.num_links_opened == 1
    again = two.send(two.a, two.b, [1], [40])
    two.until(lambda: again in two.b.received)
    assert isinstance(two.b.received[again], Received)


def test_leases_are_renewed_while_the_receiving_nodes_loop_is_in_a_long_step() -> None:
    options, now = replace(real("shm"), lease_s=0.5), 0.0
    two = Two(options, lambda: now)
    assert isinstance(two.b.pages, HeldPages)
    two.b.pages.go_on.clear()
    there = two.send(two.a, two.b, [1], [40])
    two.until(lambda: num_slots_out(two.b.receiver) > 0)
    transfer = two.a.sender.transfers.get(there)
    assert transfer is not None
    for _ in range(6):
        now += options.lease_s / 2
        two.a.step()
        until(lambda: transfer.deadline == now + options.lease_s)  # noqa: B023
    assert not two.a.sent
    two.b.pages.go_on.set()
    two.until(lambda: there in two.a.sent)
    assert two.a.sent[there].ok
    two.close()


def test_a_side_that_is_not_used_costs_no_thread_and_no_descriptor() -> None:
    options = real("gloo")
    ControlThread().close()
    threads, descriptors = num_threads(), num_descriptors()
    with_sides = RealNode("a", options)
    with_threads, with_descriptors = num_threads() - threads, num_descriptors() - descriptors
    with_sides.close()
    threads, descriptors = num_threads(), num_descriptors()
    bare = ControlThread()
    bare.bind("127.0.0.1", 0)
    bare.start()
    until(lambda: num_threads() - threads == with_threads)
    assert num_descriptors() - descriptors == with_descriptors
    bare.close()
