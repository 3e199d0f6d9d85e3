"""Whatever is lost, doubled, late, cancelled or killed: every key ends once, and no page is touched afterwards."""

from __future__ import annotations

import random
from functools import partial
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.kvtransfer.states import Received
from shared.protocol.messages import Struct
from shared.protocol.transfer_messages import ReceiverToSender, SenderToReceiver
from tests.fake_network import Faults
from tests.unit.kvtransfer.world import DecodeHost, PrefillHost, World, key

MESSAGES: tuple[type[Struct], ...] = get_args(SenderToReceiver | ReceiverToSender)
PAIRS = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
NODES = ["p0", "p1", "d0", "d1"]


def faults_of(rnd: random.Random) -> Faults:
    def sometimes(most: float) -> float:
        return rnd.choice([0.0, 0.0, rnd.random() * most])

    return Faults(
        delay_s=(0.0001, rnd.choice([0.001, 0.02, 0.2])),
        link_delay_s=(0.0001, rnd.choice([0.001, 0.05])),
        drop=sometimes(0.05),
        duplicate=sometimes(0.2),
        reorder=sometimes(0.05),
        silent_kill=rnd.random() < 0.3,
        stuck_op=rnd.random(),
    )


def crossed(world: World) -> None:
    """What the two ends of one transfer may believe about each other, where both lived to tell."""
    for prefill in world.prefills.values():
        for ended_key, end in prefill.ended.items():
            if end.ok:
                witnesses = [d.ended[ended_key] for d in world.decodes.values() if ended_key in d.ended]
                assert all(isinstance(witness, Received) for witness in witnesses)


@pytest.mark.parametrize("block", range(10))
def test_random_trials(block: int) -> None:
    num_received = 0
    for seed in range(block * 30, block * 30 + 30):
        num_received += random_trial(seed)
    assert num_received > 100


def random_trial(seed: int) -> int:
    rnd = random.Random(seed)
    world = World(seed, faults_of(rnd), prefills=("p0", "p1"), decodes=("d0", "d1"))
    for host in world.hosts:
        host.pages.in_the_middle = partial(interrupt, world, host, rnd)
    for number in range(rnd.randint(1, 25)):
        p, d = rnd.choice(PAIRS)
        total = rnd.randint(1, 12)
        prefix = rnd.choice([0, 0, rnd.randint(0, total)])
        for on_prefill in rnd.choice([(True, False), (False, True)]):
            if rnd.random() < 0.03:
                continue  # this node never hears of it
            if on_prefill:
                world.prefills[p].open(key(number), d, total)
            else:
                num_known = rnd.choice([None, 3])  # the pages of a request that moves are bulk
                world.decodes[d].open(key(number), p, total, prefix, num_known=num_known)
            if rnd.random() < 0.3:
                world.run(rnd.random() * 0.2)
        misfortune(world, rnd)
    world.settle()
    crossed(world)
    num_received = sum(
        isinstance(end, Received) for host in world.decodes.values() for end in host.ended.values()
    )
    world.close()
    return num_received


def interrupt(world: World, host: PrefillHost | DecodeHost, rnd: random.Random) -> None:
    """The scheduler and control threads do something while the data thread touches pages."""
    if rnd.random() < 0.02 and host.live:
        host.side.cancel(rnd.choice(list(host.live)), "cancelled in the middle")
    if rnd.random() < 0.01:
        host.side.end_link_of(rnd.choice(NODES), "lost in the middle")
    if rnd.random() < 0.1:
        host.step()


def misfortune(world: World, rnd: random.Random) -> None:
    match rnd.randrange(40):
        case 0 | 1 | 2:
            host = rnd.choice(world.hosts)
            if host.live:
                host.side.cancel(rnd.choice(list(host.live)), "the client went away")
        case 3:
            world.restart(rnd.choice(NODES))
        case 4:
            p, d = rnd.choice(PAIRS)
            world.network.disconnect(p, d)
            world.run(rnd.random() * 0.2)
            world.network.connect(p, d)
        case 5:
            world.network.corrupt_payloads()
        case 6 | 7:
            world.network.drop_next(rnd.choice(MESSAGES))
        case 8:
            world.network.delay(rnd.choice(MESSAGES), rnd.choice([0.0, 0.3]))


class Transfers(RuleBasedStateMachine):
    """The same, with steps that hypothesis chooses and shrinks; one prefill and one decode node."""

    def __init__(self) -> None:
        super().__init__()
        self.next_number = 0
        self.world: World | None = None

    @initialize(
        seed=st.integers(0, 2**16),
        drop=st.sampled_from([0.0, 0.02]),
        duplicate=st.sampled_from([0.0, 0.2]),
        reorder=st.sampled_from([0.0, 0.0, 0.1]),
        silent_kill=st.booleans(),
    )
    def start(self, seed: int, drop: float, duplicate: float, reorder: float, silent_kill: bool) -> None:
        faults = Faults(drop=drop, duplicate=duplicate, reorder=reorder, silent_kill=silent_kill)
        self.world = World(seed, faults)

    @property
    def w(self) -> World:
        assert self.world is not None
        return self.world

    @rule(total=st.integers(1, 9), prefix=st.integers(0, 9), spare=st.integers(0, 1), order=st.integers(0, 3))
    def open(self, total: int, prefix: int, spare: int, order: int) -> None:
        """Order 0 and 1: both ends, either first; 2 and 3: only one end ever opens it."""
        new = key(self.next_number)
        self.next_number += 1
        if order in (0, 2):
            self.w.p.open(new, "d0", total)
        if order != 2:
            self.w.d.open(new, "p0", total, min(prefix, total), spare)
        if order == 1:
            self.w.p.open(new, "d0", total)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.05, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.w.run(seconds, dt=min(seconds, 0.02))

    @rule(on_prefill=st.booleans(), choice=st.integers(0, 100))
    def cancel(self, on_prefill: bool, choice: int) -> None:
        host = self.w.p if on_prefill else self.w.d
        if host.live:
            host.side.cancel(list(host.live)[choice % len(host.live)], "the client went away")

    @rule(message=st.sampled_from(MESSAGES))
    def drop_next(self, message: type[Struct]) -> None:
        self.w.network.drop_next(message)

    @rule(message=st.sampled_from(MESSAGES))
    def hold(self, message: type[Struct]) -> None:
        self.w.network.hold(message)

    @rule(message=st.sampled_from(MESSAGES))
    def release(self, message: type[Struct]) -> None:
        self.w.network.release(message)

    @rule()
    def corrupt(self) -> None:
        self.w.network.corrupt_payloads()

    @rule(name=st.sampled_from(["p0", "d0"]))
    def restart(self, name: str) -> None:
        self.w.restart(name)

    @rule()
    def reconnect(self) -> None:
        self.w.network.disconnect("p0", "d0")
        self.w.network.connect("p0", "d0")

    @precondition(lambda self: self.world is not None)
    @rule(name=st.sampled_from(["p0", "d0"]), seconds=st.sampled_from([0.1, 2.0]))
    def stop_and_resume(self, name: str, seconds: float) -> None:
        others = [host for host in (self.w.p, self.w.d) if host.name != name]
        self.w.network.stop(name)
        for _ in range(round(seconds / 0.05)):
            self.w.network.advance(0.05)
            for host in others:
                host.step()
        self.w.network.resume(name)

    def teardown(self) -> None:
        if self.world is None:
            return
        for message in MESSAGES:
            self.w.network.release(message)
        self.w.settle()
        crossed(self.w)
        # After all of that the pair works.
        last = key(self.next_number)
        self.w.network.faults = Faults()
        self.w.network._drops.clear()
        self.w.run(2.0)
        assert self.w.p.open(last, "d0", 6)
        assert self.w.d.open(last, "p0", 6, 1)
        self.w.network.num_payloads_to_corrupt = 0
        self.w.run(1.0)
        assert self.w.p.ended[last].ok, self.w.p.ended[last].reason
        self.w.settle()
        self.w.close()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=25)
