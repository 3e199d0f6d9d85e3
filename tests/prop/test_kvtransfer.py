"""Whatever is lost, doubled, late, cancelled or killed: every key ends once, and no page is touched afterwards."""

from __future__ import annotations

import random
from functools import partial
from typing import get_args

import pytest

from shared.kvtransfer.states import Received
from shared.protocol.messages import Struct
from shared.protocol.transfer_messages import ReceiverToSender, SenderToReceiver
from tests.fake_network import Faults
from tests.unit.kvtransfer.world import DecodeHost, PrefillHost, World, key

MESSAGES: tuple[type[Struct], ...] = get_args(SenderToReceiver | ReceiverToSender)
PAIRS = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
NODES = ["p0", "p1", "d0", "d1"]
LAST = 100
"""Of the keys in a trial, the first that is opened when all else is over."""


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


@pytest.mark.parametrize("block", range(6))
def test_random_trials(block: int) -> None:
    num_received = 0
    for seed in range(block * 20, block * 20 + 20):
        num_received += random_trial(seed)
    assert num_received > 60


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
    world.network.release_all()
    world.settle()
    crossed(world)
    check_it_works(world)
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
        case 9:
            world.network.hold(rnd.choice(MESSAGES))
        case 10 | 11:
            world.network.release_all()
        case 12:
            stop_and_resume(world, rnd.choice(world.hosts), rnd.choice([0.1, 2.0]))


def stop_and_resume(world: World, stopped: PrefillHost | DecodeHost, seconds: float) -> None:
    world.network.stop(stopped.name)
    for _ in range(round(seconds / 0.05)):
        world.network.advance(0.05)
        for host in world.hosts:
            if host is not stopped:
                host.step()
    world.network.resume(stopped.name)


def check_it_works(world: World) -> None:
    """After all of that each pair moves pages."""
    world.network.end_faults()
    for host in world.hosts:
        host.pages.in_the_middle = lambda: None
    world.run(2.0, dt=0.05)
    for number, (p, d) in enumerate(PAIRS, LAST):
        assert world.prefills[p].open(key(number), d, 6) and world.decodes[d].open(key(number), p, 6, 1)
    world.run(1.0)
    for number, (p, _) in enumerate(PAIRS, LAST):
        assert (end := world.prefills[p].ended[key(number)]).ok, end.reason
    world.check_home()
