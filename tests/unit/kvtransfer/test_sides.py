"""KVSender and KVReceiver against each other, messages ordered by construction, on a controlled clock."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
import torch

from shared.kvtransfer.states import Received, ReceiveFailed
from shared.protocol.messages import PROTOCOL_VERSION, NodeRef, Refused, Struct
from shared.protocol.transfer_messages import (
    CancelTransfer,
    Done,
    Grant,
    Handoff,
    LeaseRenew,
    LinkLost,
    LinkOpen,
    Offer,
    PeerHello,
    Ready,
    StoreSet,
)
from tests.fake_link import fake_transports
from tests.fake_network import FakeNetwork, Faults
from tests.unit.kvtransfer.looks import num_live, num_slots_out, peer_states
from tests.unit.kvtransfer.world import FAST, LAYOUT, DecodeHost, PrefillHost, World, handoff, key

torch.set_num_threads(1)
SLOW_OPS = replace(FAST, op_timeout_s=10.0)
"""For tests in which a chunk is under way for long."""


NewWorld = Callable[..., World]


@pytest.fixture
def new_world() -> Iterator[NewWorld]:
    with contextlib.ExitStack() as worlds:
        yield lambda **kw: worlds.enter_context(contextlib.closing(World(**kw)))


@pytest.fixture
def world(new_world: NewWorld) -> Iterator[World]:
    world = new_world()
    yield world
    world.settle()


def advance(num_steps: int, network: FakeNetwork, *hosts: PrefillHost | DecodeHost) -> None:
    """Only these hosts go on."""
    for _ in range(num_steps):
        network.advance(0.01)
        for host in hosts:
            host.step()


def failure(world: World, number: int = 0) -> ReceiveFailed:
    end = world.d.ended[key(number)]
    assert isinstance(end, ReceiveFailed), end
    return end


def open_both(
    world: World,
    total: int = 6,
    prefix: int = 0,
    number: int = 0,
    *,
    rate: int | None = None,
    seconds: float = 0,
) -> None:
    """At both nodes, of which the prefill node computes `rate` pages a step. Then so much time passes."""
    world.p.rate = world.p.rate if rate is None else rate
    world.p.open(key(number), "d0", total)
    world.d.open(key(number), "p0", total, prefix)
    if seconds:
        world.run(seconds)


# -------------------------------------------------------------------------------------- the good case
@pytest.mark.parametrize(("prefix", "spare"), [(0, 0), (0, 3), (2, 0), (6, 0)])
@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_sequence_moves_without_the_prefix_that_is_there(
    world: World, prefix: int, spare: int, prefill_first: bool
) -> None:
    """More pages may be reserved than come."""
    openers: list[Callable[[], bool]] = [
        lambda: world.p.open(key(0), "d0", 6),
        lambda: world.d.open(key(0), "p0", 6, prefix, spare),
    ]
    for opener in openers if prefill_first else reversed(openers):
        opener()
        world.run(0.3)
    world.run(1.0)
    end = world.d.ended[key(0)]
    assert isinstance(end, Received)
    assert end.pages == 6 - prefix
    assert world.p.ended[key(0)].ok
    assert world.p.ended[key(0)].nbytes == end.nbytes
    assert world.network.num_sent["Offer"] == -(-(6 - prefix) // 2)
    assert world.p.num_wakes >= 2
    assert world.d.num_wakes == 1


def test_an_offer_needs_no_forward_to_be_granted_while_the_next_pages_are_computed(world: World) -> None:
    open_both(world, rate=0, seconds=0.5)
    world.p.rate = 3
    world.p.step()
    world.p.rate = 0
    world.run(0.5)
    assert world.d.pages.num_scatters == 6  # three pages of three layers, two layers at most in a slot
    assert world.d.live
    world.p.rate = 3
    world.run(0.5)
    assert isinstance(world.d.ended[key(0)], Received)


def test_pages_of_a_request_that_still_runs_elsewhere_come_after_those_of_others(world: World) -> None:
    """They were offered first. Alone they make no other transfer wait, so their link may be filled with them."""
    moving, prefilled = key(0), key(1)
    num_offered, num_chunks = 99, 2 * 99
    world.p.rate = num_offered

    def tick() -> None:
        world.run(0.001, dt=0.001)

    assert world.p.open(moving, "d0", num_offered + 1)
    assert world.d.open(moving, "p0", num_offered + 1, 0, num_known=3)
    assert world.p.open(prefilled, "d0", 6) and world.d.open(prefilled, "p0", 6, 0)
    was_hurried = False
    while prefilled not in world.d.ended:
        tick()
        was_hurried |= world.d.side.is_hurried()
        if world.p.live[moving].next_page:
            world.p.rate = 0
    assert was_hurried and world.d.pages.num_scatters < num_chunks / 2
    num_scatters = world.d.pages.num_scatters
    tick()
    assert not world.d.side.is_hurried() and num_scatters < num_chunks
    world.p.rate = 1
    world.run(2.0)
    assert isinstance(world.d.ended[moving], Received)


@pytest.mark.parametrize("at", ["p0", "d0"])
def test_a_cancel_reaches_the_other_node(at: str, world: World) -> None:
    open_both(world, rate=0, seconds=0.3)
    side = world.p.side if at == "p0" else world.d.side
    side.cancel(key(0), "the client went away")
    side.cancel(key(0), "again")
    world.run(0.3)
    end = ReceiveFailed(key(0), "the client went away", by_peer=at == "p0", sender="p0")
    assert failure(world) == end
    assert not world.p.ended[key(0)].ok and "the client went away" in world.p.ended[key(0)].reason


def test_a_chunk_granted_before_the_cancel_is_sent_void_and_dropped(world: World) -> None:
    world.network.hold(Grant)
    open_both(world, seconds=0.3)
    assert num_slots_out(world.d.side) == FAST.num_slots
    world.p.side.cancel(key(0), "aborted")
    world.run(0.05)
    assert world.p.ended[key(0)].reason == "aborted"
    assert failure(world).by_peer
    world.network.release(Grant)
    world.run(0.1)
    assert world.p.pages.num_gathers == world.d.pages.num_scatters == 0
    assert num_slots_out(world.d.side) == 0
    assert world.d.side.num_links_opened == 1


@pytest.mark.parametrize("host_name", ["p0", "d0"])
@pytest.mark.parametrize("how", ["cancelled", "link lost", "cancelled by the peer", "closed"])
def test_the_terminal_event_waits_for_the_gather_or_scatter_under_way(
    host_name: str, how: str, new_world: NewWorld
) -> None:
    world = new_world()
    host: PrefillHost | DecodeHost = world.p if host_name == "p0" else world.d
    peer = "d0" if host_name == "p0" else "p0"
    seen_in_the_middle: list[bool] = []

    def end_it() -> None:
        match how:
            case "cancelled":
                host.side.cancel(key(0), "aborted")
            case "link lost":
                host.side.end_link_of(peer, "test")
            case "cancelled by the peer":
                host.side.on_message(peer, CancelTransfer(key(0), "aborted"))
            case "closed":
                host.side.end_link_of(peer, "closing")  # all of close() but the joining of threads
        host.step()
        seen_in_the_middle.append(key(0) in host.ended)

    host.pages.in_the_middle = end_it
    open_both(world, seconds=0.5)
    assert seen_in_the_middle == [False]
    assert key(0) in host.ended
    assert not isinstance(host.ended[key(0)], Received)
    world.settle()


@pytest.mark.parametrize("cancel_lost", [False, True])
def test_a_void_chunk_that_overtakes_the_handoff_leaves_it_to_the_cancel_how_the_transfer_ends(
    cancel_lost: bool, world: World
) -> None:
    """The cancel alone says whether the sending node still speaks for the request."""
    world.network.hold(Grant)
    world.network.hold(Handoff)
    open_both(world, seconds=0.3)
    if cancel_lost:  # then the answer to a renewal ends the transfer
        world.network.drop_next(CancelTransfer)
    else:
        world.network.hold(CancelTransfer)
    world.p.side.cancel(key(0), "aborted")
    world.network.release(Grant)
    world.run(0.1)
    assert num_slots_out(world.d.side) == world.d.pages.num_scatters == 0
    world.network.release(Handoff)
    world.network.release(CancelTransfer)
    world.run(FAST.lease_s / 3 + 0.1)
    assert world.p.ended[key(0)].handed_off
    assert failure(world) == ReceiveFailed(key(0), "aborted", by_peer=True, handed_off=True, sender="p0")


def test_a_cancel_that_comes_before_the_request_ends_it_at_once(world: World) -> None:
    world.p.open(key(0), "d0", 4)
    world.p.side.cancel(key(0), "aborted")
    world.d.open(key(1), "p0", 4, 0)
    world.d.side.cancel(key(1), "aborted")
    world.run(0.5)
    world.d.open(key(0), "p0", 4, 0)
    world.p.open(key(1), "d0", 4)
    world.run(0.05)
    assert failure(world) == ReceiveFailed(key(0), "aborted", by_peer=True, sender="p0")
    assert not world.p.ended[key(1)].ok


# ----------------------------------------------------------------------- parking, tombstones, deadlines
def test_a_ready_whose_request_never_comes_is_answered_with_a_cancel(world: World) -> None:
    world.d.open(key(0), "p0", 4, 0)
    world.run(FAST.park_s - 0.2)
    assert world.d.live
    world.run(0.5)
    assert failure(world) == ReceiveFailed(
        key(0), "the request never came to the sending node", by_peer=True, sender="p0"
    )


def test_of_too_many_readies_the_oldest_is_answered_with_a_cancel(new_world: NewWorld) -> None:
    world = new_world(options=replace(FAST, max_parked=1))
    for number in range(2):
        world.d.open(key(number), "p0", 4, 0)
    world.run(0.1)
    reason = "too many transfers wait for their request at the sending node"
    assert failure(world) == ReceiveFailed(key(0), reason, by_peer=True, sender="p0")
    assert key(1) in world.d.live


def test_a_prefill_node_waits_for_the_reservation_only_so_long(world: World) -> None:
    world.p.open(key(0), "d0", 4)
    world.run(FAST.ready_timeout_s - 0.1)
    assert world.p.live
    world.network.drop_next(CancelTransfer)
    world.run(0.2)
    assert "no pages in time" in world.p.ended[key(0)].reason
    # The reservation comes after all: the decode node is told at once.
    world.d.open(key(0), "p0", 4, 0)
    world.run(0.1)
    assert failure(world).by_peer


def test_a_late_message_does_not_reopen_an_ended_key(world: World) -> None:
    world.network.hold(Ready)
    open_both(world, seconds=0.1)
    world.p.side.cancel(key(0), "aborted")
    world.run(0.1)
    world.network.release(Ready)
    world.run(0.1)
    assert not [*world.p.side.transfers, *world.d.side.transfers]
    assert world.network.num_sent["Offer"] == 0


@pytest.mark.parametrize("late", [Offer, Handoff])
def test_whoever_speaks_of_an_ended_key_is_told_so(world: World, late: type[Struct]) -> None:
    world.network.hold(Offer)
    world.network.hold(Handoff)
    open_both(world, total=2, seconds=0.1)
    world.network.drop_next(CancelTransfer)
    world.d.side.cancel(key(0), "aborted")
    world.run(0.1)
    assert world.p.live
    world.network.release(late)
    world.run(0.05)
    assert world.p.ended[key(0)].reason == "aborted"


def test_a_prompt_may_wait_long_in_the_prefill_nodes_queue_but_not_for_ever(world: World) -> None:
    open_both(world, rate=0, seconds=FAST.offer_timeout_s - 0.1)
    assert world.d.live
    world.run(0.3)
    assert "no pages were offered" in failure(world).reason
    assert "no pages were offered" in world.p.ended[key(0)].reason


def offer_one(world: World) -> None:
    world.p.rate = 1
    world.p.step()
    world.p.rate = 0


@pytest.mark.parametrize("handed_off", [False, True])
def test_offered_pages_that_do_not_arrive_fail_the_transfer(handed_off: bool, new_world: NewWorld) -> None:
    world = new_world(options=SLOW_OPS)
    world.network.hold(Grant)
    open_both(world, total=1 if handed_off else 4, rate=0, seconds=0.1)
    offer_one(world)
    world.run(FAST.transfer_timeout_s - 0.1)
    assert world.d.live
    world.run(0.3)
    assert "no progress" in failure(world).reason
    assert "no progress" in world.p.ended[key(0)].reason
    world.network.release(Grant)
    world.settle()


def test_a_chunk_may_be_computed_for_longer_than_a_transfer_may_stand_still(world: World) -> None:
    open_both(world, total=4, rate=0)
    for _ in range(4):
        world.run(FAST.offer_timeout_s - 0.2)
        assert FAST.offer_timeout_s > FAST.transfer_timeout_s + 1
        offer_one(world)
    world.run(0.3)
    assert isinstance(world.d.ended[key(0)], Received)


def test_a_chunk_that_is_never_computed_fails_the_transfer(world: World) -> None:
    open_both(world, total=4, rate=0, seconds=0.1)
    offer_one(world)
    world.run(FAST.offer_timeout_s + 0.3)
    assert "no pages were offered" in failure(world).reason


def test_each_chunk_that_arrives_renews_the_deadline(new_world: NewWorld) -> None:
    delay = FAST.transfer_timeout_s / 2
    world = new_world(faults=Faults(link_delay_s=(delay, delay)), options=replace(SLOW_OPS, num_slots=1))
    open_both(world, total=4, seconds=8.5 * delay)
    assert isinstance(world.d.ended[key(0)], Received)
    world.settle()


def test_a_step_of_the_decode_nodes_loop_may_last_longer_than_a_lease(new_world: NewWorld) -> None:
    world = new_world(options=replace(SLOW_OPS, transfer_timeout_s=60.0))
    world.network.hold(Grant)
    open_both(world, total=2, seconds=0.3)
    for _ in range(10):  # its control thread answers meanwhile
        world.network.advance(FAST.lease_s / 3)
        world.p.step()
    assert key(0) in world.p.live
    world.network.release(Grant)
    world.run(0.3)
    assert world.p.ended[key(0)].ok
    world.settle()


def test_pages_handed_off_are_held_while_the_lease_is_renewed_and_no_longer(world: World) -> None:
    world.network.hold(Grant)
    open_both(world, total=2, seconds=FAST.op_timeout_s * 0.9)
    assert world.p.live
    world.network.release(Grant)
    world.run(0.1)
    assert world.p.ended[key(0)].ok

    world.network.drop_next(Done)
    open_both(world, total=2, number=1, seconds=FAST.lease_s - 0.1)
    assert isinstance(world.d.ended[key(1)], Received)
    assert key(1) in world.p.live
    world.run(0.3)
    assert "lease" in world.p.ended[key(1)].reason


def test_pages_are_held_without_a_lease_while_the_prompt_is_computed(world: World) -> None:
    open_both(world, total=4, rate=0, seconds=FAST.lease_s / 2)
    assert world.network.num_sent["LeaseRenew"]
    world.network.drop_next(LeaseRenew, 100)
    offer_one(world)
    world.run(FAST.lease_s * 1.5)
    world.p.rate = 4
    world.run(0.3)
    assert world.p.ended[key(0)].ok


@pytest.mark.parametrize("cancel_lost", [False, True])
def test_a_transfer_whose_handoff_was_lost_fails_as_one_that_was_handed_off(
    cancel_lost: bool, world: World
) -> None:
    """As by a connection that broke. The sending node speaks for its request no more."""
    world.network.drop_next(Handoff)
    open_both(world, seconds=0.3)
    if cancel_lost:  # then the answer to a renewal ends the transfer
        world.network.drop_next(CancelTransfer)
    world.p.side.cancel(key(0), "aborted")
    world.run(FAST.lease_s / 3 + 0.1)
    assert world.p.ended[key(0)].handed_off
    assert failure(world) == ReceiveFailed(key(0), "aborted", by_peer=True, handed_off=True, sender="p0")


def test_a_renewal_of_a_transfer_that_has_ended_is_answered(world: World) -> None:
    open_both(world, rate=0, seconds=0.1)
    world.network.drop_next(CancelTransfer)
    world.p.side.cancel(key(0), "aborted")
    world.run(FAST.lease_s / 3 + 0.1)
    assert failure(world) == ReceiveFailed(key(0), "aborted", by_peer=True, sender="p0")


# ------------------------------------------------------------------------------- what the peer must not do
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([Offer(key(0), 3, 1)], "offer of page 3 where page 1 was due"),
        ([Offer(key(0), 1, 6)], "offer up to page 7 exceeds the 5 pages reserved from page 1 on"),
        ([Offer(key(0), 1, 5), handoff(key(0), 7)], "handoff of 7 pages exceeds the 5 pages reserved"),
        ([Offer(key(0), 1, 2), handoff(key(0), 6)], "handoff of 6 pages after offers of 3"),
        ([Offer(key(0), 1, 5), handoff(key(0), 5)], "handoff of 5 pages after offers of 6"),
        (
            [Offer(key(0), 1, 5), msgspec.structs.replace(handoff(key(0), 6), kv_len=99)],
            "6 pages for 99 tokens",
        ),
        ([Offer(key(0), 1, 2), handoff(key(0), 3), Offer(key(0), 3, 1)], "offer after the handoff"),
    ],
)
def test_counts_that_do_not_fit_fail_the_transfer(world: World, messages: list[Struct], reason: str) -> None:
    open_both(world, total=6, prefix=1, rate=0, seconds=0.3)
    world.network.hold(Grant)
    for message in messages:
        world.p.side._outbox.send("d0", message)
    world.run(0.1)
    assert reason in failure(world).reason
    assert not failure(world).by_peer
    world.network.release(Grant)


def test_repeated_messages_change_nothing(new_world: NewWorld) -> None:
    world = new_world(faults=Faults(duplicate=1.0))
    world.run(0.5)
    open_both(world, seconds=0.5)
    assert isinstance(world.d.ended[key(0)], Received)
    assert world.p.ended[key(0)].ok
    world.settle()


def test_a_node_that_ends_in_order_is_not_called_silent(
    caplog: pytest.LogCaptureFixture, new_world: NewWorld
) -> None:
    world = new_world()
    open_both(world, seconds=1.0)
    num_links = world.d.side.num_links_opened
    assert num_live(world.d.side) == 1
    world.p.side.close()
    world.network.advance(0.01)
    assert "p0" not in world.d.side._peers and num_live(world.d.side) == 0, "it was told"
    world.run(2 * FAST.peer_timeout_s)
    assert "p0" not in world.d.side._peers
    assert world.d.side.num_links_opened == num_links
    assert "peer_silent" not in caplog.text


def test_another_peer_cannot_touch_a_transfer(new_world: NewWorld) -> None:
    world = new_world(prefills=("p0", "p1"))
    open_both(world, rate=0, seconds=0.2)
    other = world.prefills["p1"].side._outbox
    other.send("d0", CancelTransfer(key(0), "not yours"))
    other.send("d0", Offer(key(0), 0, 6))
    world.run(0.2)
    assert world.d.live
    world.p.rate = 2
    world.run(0.5)
    assert isinstance(world.d.ended[key(0)], Received)
    world.settle()


@pytest.mark.parametrize(
    "message",
    [Ready(key(0), 3, 6), Done(key(0), False, "not yours"), CancelTransfer(key(0), "not yours")],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("when", ["waiting", "offering"])
def test_another_decode_node_cannot_touch_a_transfer(message: Struct, when: str, new_world: NewWorld) -> None:
    world = new_world(decodes=("d0", "d1"))
    world.p.rate = 0
    world.p.open(key(0), "d0", 6)
    if when == "offering":
        world.d.open(key(0), "p0", 6, 0)
    world.run(0.2)
    world.decodes["d1"].side._outbox.send("p0", message)
    world.run(0.2)
    if when == "waiting":
        world.d.open(key(0), "p0", 6, 0)
    world.p.rate = 2
    world.run(0.5)
    received = world.d.ended[key(0)]
    assert isinstance(received, Received)
    assert received.pages == 6
    world.settle()


def test_another_decode_node_cannot_renew_a_lease(new_world: NewWorld) -> None:
    world = new_world(decodes=("d0", "d1"))
    world.network.drop_next(Done)
    open_both(world, total=2)
    for _ in range(8):
        world.run(FAST.lease_s / 4)
        world.decodes["d1"].side._outbox.send("p0", LeaseRenew((key(0),)))
    assert "lease" in world.p.ended[key(0)].reason
    world.settle()


def changed(grant: Grant, change: dict[str, int]) -> Grant:
    """With another `seq`, or another field of its last chunk."""
    if "seq" in change:
        return msgspec.structs.replace(grant, seq=change["seq"])
    *others, last = grant.chunks
    return msgspec.structs.replace(grant, chunks=(*others, msgspec.structs.replace(last, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"seq": 9}, {"nbytes": 63}, {"nbytes": 10**9}, {"num_layers": 99}, {"first_layer": 3}, {"num_pages": 0}],
)
def test_a_grant_that_makes_no_sense_ends_the_link(world: World, change: dict[str, int]) -> None:
    world.network.hold(Grant)
    open_both(world, seconds=0.2)
    assert world.network.num_held(Grant)
    grant = world.network.take_held(Grant)
    world.p.side.on_message("d0", changed(grant, change))
    world.network.release(Grant)
    world.run(0.3)
    assert "link lost" in failure(world).reason
    assert "link lost" in world.p.ended[key(0)].reason
    assert world.d.side.num_links_opened == 2


# ------------------------------------------------------------------------------------------ links, peers
def test_another_layout_is_refused_by_the_name_of_its_field() -> None:
    network = FakeNetwork()
    p = PrefillHost(network, "p0", FAST, msgspec.structs.replace(LAYOUT, dtype="bfloat16"))
    d = DecodeHost(network, "d0", FAST)
    d.open(key(0), "p0", 4, 0)
    p.open(key(0), "d0", 4)
    network.connect("p0", "d0")
    advance(20, network, p, d)
    for end in (p.ended[key(0)], d.ended[key(0)]):
        assert not isinstance(end, Received)
        assert "dtype: this node has 'float32', the peer has 'bfloat16'" in end.reason
    assert peer_states(p.side) == {"d0": "refused"}
    assert peer_states(d.side) == {"p0": "refused"}
    p.open(key(1), "d0", 4)
    d.open(key(1), "p0", 4, 0)
    p.step()
    d.step()
    assert "dtype" in p.ended[key(1)].reason
    assert isinstance(d.ended[key(1)], ReceiveFailed)
    assert network.num_sent["LinkOpen"] == 0


@pytest.mark.parametrize("by", [-2, -1, 0, 1, 2])
def test_a_sending_node_of_a_version_too_far_away_is_refused_with_both(by: int) -> None:
    network = FakeNetwork()
    d = DecodeHost(network, "d0", FAST)
    answers: list[Struct] = []
    outbox = network.join("p0", lambda peer, message: answers.append(message))
    network.connect("p0", "d0")
    transports, version = fake_transports(network, "p0", FAST), PROTOCOL_VERSION + by
    node, offered = NodeRef("p0", "p0", "fake://p0"), tuple(transports.factories)
    outbox.send("d0", PeerHello(node, LAYOUT, offered, transports.place, 4096, version))
    network.advance(0.01)
    if abs(by) <= 1:
        assert isinstance(answers[0], LinkOpen)
    else:
        (refused,) = answers
        assert isinstance(refused, Refused)
        assert f"speaks version {version}, and this end version {PROTOCOL_VERSION}," in refused.reason
        assert d.side.unreachable == {"p0": refused.reason}, "routers are told"


@pytest.mark.parametrize("allowed", [False, True])
def test_pages_of_other_numerics_move_only_where_that_is_allowed(allowed: bool) -> None:
    network = FakeNetwork()
    p = PrefillHost(network, "p0", FAST, msgspec.structs.replace(LAYOUT, numerics="native-1/amx/float32"))
    d = DecodeHost(network, "d0", replace(FAST, allow_mixed_numerics=allowed))
    d.open(key(0), "p0", 4, 0)
    p.open(key(0), "d0", 4)
    network.connect("p0", "d0")
    advance(100, network, p, d)
    if allowed:
        assert isinstance(d.ended[key(0)], Received)
    else:
        assert "numerics: this node has '', the peer has 'native" in p.ended[key(0)].reason
        assert all("numerics" in reason for side in (p.side, d.side) for reason in side.unreachable.values())
        assert len(p.side.unreachable) == len(d.side.unreachable) == 1, "routers are told"


def test_a_reservation_waits_for_its_peer_to_connect() -> None:
    network = FakeNetwork()
    d = DecodeHost(network, "d0", FAST)
    d.open(key(0), "p0", 4, 0)
    advance(100, network, d)
    assert network.num_sent["Ready"] == network.num_sent["LeaseRenew"] == 0
    p = PrefillHost(network, "p0", FAST)
    p.open(key(0), "d0", 4)
    network.connect("p0", "d0")
    advance(100, network, p, d)
    assert isinstance(d.ended[key(0)], Received)
    d.open(key(1), "nobody", 4, 0)
    p.open(key(1), "nobody", 4)
    advance(200, network, p, d)
    assert "sending node nobody" in d.ended[key(1)].reason  # type: ignore[union-attr]
    assert "receiving node nobody" in p.ended[key(1)].reason


@pytest.mark.parametrize("silent_kill", [False, True], ids=["reported", "silent"])
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_killed_peer_fails_what_it_had_under_way(
    victim: str, silent_kill: bool, new_world: NewWorld
) -> None:
    world = new_world(faults=Faults(silent_kill=silent_kill))
    world.network.hold(Grant)
    open_both(world, seconds=0.2)
    survivor: PrefillHost | DecodeHost = world.d if victim == "p0" else world.p
    world.network.kill(victim)
    advance(300, world.network, survivor)
    assert key(0) in survivor.ended
    assert num_slots_out(survivor.side) == 0
    survivor.pages.audit()
    world.restart(victim)
    open_both(world, number=1)
    world.network.release(Grant)
    world.run(1.0)
    assert isinstance(world.d.ended[key(1)], Received)


def test_slots_of_a_dead_link_come_home_at_its_abort_and_not_at_the_timeout_of_a_stuck_op(
    new_world: NewWorld,
) -> None:
    world = new_world(faults=Faults(stuck_op=1.0, notice_s=(0.01, 0.01)))
    world.network.hold(Grant)
    open_both(world, seconds=0.1)
    assert num_slots_out(world.d.side) == FAST.num_slots
    world.network.kill("p0")
    advance(4, world.network, world.d)
    assert key(0) in world.d.ended
    assert num_slots_out(world.d.side) == 0


def test_a_stopped_peer_is_found_by_pings_and_comes_back(world: World) -> None:
    world.run(0.3)
    world.network.stop("p0")
    world.d.open(key(0), "p0", 4, 0)
    advance(200, world.network, world.d)
    assert "silent" in failure(world).reason
    assert peer_states(world.d.side) == {"p0": "silent"}
    world.network.resume("p0")
    world.run(1.0)
    assert peer_states(world.d.side) == {"p0": "linked"}
    open_both(world, number=1, seconds=0.5)
    assert isinstance(world.d.ended[key(1)], Received)


def test_the_canary_alone_fails_transfers_of_a_dead_decode_node(new_world: NewWorld) -> None:
    world = new_world(faults=Faults(silent_kill=True, notice_s=(0.02, 0.02)))
    open_both(world, rate=0, seconds=0.3)
    world.network.kill("d0")
    advance(5, world.network, world.p)
    assert "the peer is gone" in world.p.ended[key(0)].reason


def test_a_stopped_decode_node_fails_even_what_waits_for_its_reservation(world: World) -> None:
    world.run(0.3)
    world.p.open(key(0), "d0", 4)
    world.network.stop("d0")
    advance(150, world.network, world.p)
    assert "silent" in world.p.ended[key(0)].reason
    assert peer_states(world.p.side) == {"d0": "silent"}
    world.network.resume("d0")


def test_a_reservation_made_on_a_link_that_was_already_lost_ends_with_the_next_link(world: World) -> None:
    world.p.rate = 0
    world.run(0.3)
    world.p.side.end_link_of("d0", "test")
    world.network.drop_next(Done)
    open_both(world)  # the decode node does not know yet
    world.run(0.3)
    assert world.d.side.num_links_opened == 2
    assert world.p.ended[key(0)].reason == "the link was replaced"


def test_success_before_the_handoff_is_no_success(world: World) -> None:
    open_both(world, rate=0, seconds=0.2)
    world.d.side._outbox.send("p0", Done(key(0), True))
    world.run(0.1)
    assert not world.p.ended[key(0)].ok


def test_a_peer_that_stays_silent_is_forgotten_and_may_still_come_back(world: World) -> None:
    world.run(0.3)
    world.network.stop("p0")
    advance(round(FAST.forget_peer_s * 120), world.network, world.d)
    assert peer_states(world.d.side) == {}
    pings = world.network.num_sent["PeerPing"]
    world.network.advance(2.0)
    world.d.step()
    assert world.network.num_sent["PeerPing"] == pings
    world.network.resume("p0")
    world.run(FAST.hello_retry_s + FAST.peer_timeout_s + 1.0)
    assert peer_states(world.d.side) == {"p0": "linked"}


def test_a_link_that_dies_is_built_anew_with_a_pause_that_grows(new_world: NewWorld) -> None:
    world = new_world()
    world.network.drop_next(StoreSet, 10**6)  # no link can be built
    opened_at: list[float] = []
    for _ in range(1000):
        before = world.d.side.num_links_opened
        world.run(0.01)
        if world.d.side.num_links_opened > before:
            opened_at.append(world.network.clock.now)
    gaps = [later - earlier - FAST.build_timeout_s for earlier, later in itertools.pairwise(opened_at)]
    assert len(gaps) > 5
    assert gaps[0] < 0.15
    assert gaps[1] > gaps[0]
    assert gaps[-1] == pytest.approx(FAST.rebuild_max_s, abs=0.1)


def test_both_ends_say_that_a_link_is_gone_until_it_is_back(world: World) -> None:
    world.run(0.3)
    assert world.p.side.unreachable == world.d.side.unreachable == {}
    world.network.stop("p0")
    advance(round(FAST.peer_timeout_s * 200), world.network, world.d)
    assert world.d.side.unreachable == {"p0": f"silent for {FAST.peer_timeout_s:g} s"}
    world.network.resume("p0")
    world.run(FAST.hello_retry_s + FAST.peer_timeout_s + 1.0)
    assert world.p.side.unreachable == world.d.side.unreachable == {}
    world.network.disconnect("p0", "d0")
    world.run(FAST.forget_peer_s + FAST.peer_timeout_s + 1.0)
    assert world.p.side.unreachable == world.d.side.unreachable == {}, "peers that are gone are not listed"


def test_a_new_pair_is_not_unreachable_before_its_link_could_not_be_built(new_world: NewWorld) -> None:
    world = new_world()
    world.network.drop_next(StoreSet, 10**6)  # no link can be built
    world.run(FAST.build_timeout_s / 2)
    assert world.p.side.unreachable == world.d.side.unreachable == {}
    world.run(FAST.build_timeout_s)
    assert "p0" in world.d.side.unreachable
    world.run(FAST.build_timeout_s / 2)
    assert "p0" in world.d.side.unreachable, "also while the next one is being built"
    world.network.connect("p0", "d0")
    world.run(0.05)
    assert "p0" in world.d.side.unreachable, "also when they have met anew"


def test_a_lost_hello_is_said_again(world: World) -> None:
    world.network.disconnect("p0", "d0")
    world.run(0.1)
    world.network.drop_next(PeerHello)
    world.network.connect("p0", "d0")
    world.run(FAST.hello_retry_s + 0.3)
    assert num_live(world.p.side) == num_live(world.d.side) == 1


def test_nodes_that_have_each_another_link_agree_on_one_again(world: World) -> None:
    """Their LinkOpens come in the wrong order, and a LinkLost is lost, so neither end is told by the other."""
    world.network.hold(LinkOpen)
    world.network.hold(StoreSet)
    world.run(0.1)
    world.network.connect("p0", "d0")
    world.run(0.1)
    older = world.network.take_held(LinkOpen)
    world.network.release(LinkOpen)
    world.run(0.01)
    world.network.drop_next(LinkLost)
    world.p.side.on_message("d0", older)
    world.network.release(StoreSet)
    world.run(2.0)
    open_both(world, seconds=1.0)
    assert world.p.ended[key(0)].ok, world.p.ended[key(0)].reason


def test_transfers_of_a_lost_link_fail_on_both_ends_and_others_go_on_later(world: World) -> None:
    world.network.hold(Grant)
    open_both(world, number=0)
    world.p.open(key(1), "d0", 3)  # still waits for its reservation
    world.run(0.2)
    world.p.side.end_link_of("d0", "test")
    world.network.release(Grant)
    world.run(0.5)
    assert "link lost" in failure(world).reason
    assert "link lost" in world.p.ended[key(0)].reason
    assert key(1) in world.p.live
    world.d.open(key(1), "p0", 3, 0)
    world.run(0.5)
    assert isinstance(world.d.ended[key(1)], Received)


def test_close_ends_everything_and_later_calls_do_nothing(new_world: NewWorld) -> None:
    world = new_world()
    world.network.hold(Grant)
    open_both(world, seconds=0.2)
    world.p.side.close()
    world.d.side.close()
    for host in (world.p, world.d):
        host.step()
        assert key(0) in host.ended
        assert num_live(host.side) == num_slots_out(host.side) == 0
        host.pages.audit()
        host.side.close()
    world.network.release(Grant)
    world.network.connect("p0", "d0")
    world.run(1.0)
    assert peer_states(world.p.side) == {}


def test_chunks_are_granted_several_to_a_message(world: World) -> None:
    open_both(world, total=16, seconds=1.0)
    assert isinstance(world.d.ended[key(0)], Received)
    num_chunks = 16 * 2  # a slot holds two layers of a page, which has three
    assert world.network.num_sent["Grant"] <= num_chunks / 1.5
