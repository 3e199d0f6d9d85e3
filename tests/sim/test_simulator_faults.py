"""Whatever goes wrong, wherever a request is: it ends exactly once, and every page comes home."""

from __future__ import annotations

import random

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape, Outcome
from planner.simulator.node import NodeShape
from planner.simulator.transport import NetworkModel
from shared.config import ScheduleOptions
from shared.kvcache.audit import LeakError, audit_idle
from tests.sim.faults import Fault, Place, Saboteur, is_empty
from tests.sim.watched_fleet import FaultyNetwork, OnStep, WatchedFleet
from tests.sim.workloads import chats

COSTS = CostModel(a=0.004, b=2e-4, c=1e-8, d=0.008, e=2e-4, f=1e-6)
BLOCK_TOKENS = 4
NOTICED_S = 0.1
"""By then everybody knows of a death, and the forward that was told to fail has failed."""


def small(
    *,
    pool_tokens: int = 128,
    host_kv_tokens: int = 0,
    retract_every: int = 0,
    overlap: bool = True,
    prefill_ahead_share: float = 0.25,
) -> NodeShape:
    """Three or four requests fill such a node."""
    return NodeShape(
        pool_tokens=pool_tokens,
        host_kv_tokens=host_kv_tokens,
        page_size=BLOCK_TOKENS,
        context_length=96,
        schedule=ScheduleOptions(
            chunked_prefill_size=12,
            max_running_requests=6,
            num_reserved_decode_tokens=2,
            retract_every=retract_every,
            retract_policy="host" if host_kv_tokens else "recompute",
            disable_overlap_schedule=not overlap,
            prefill_ahead_share=prefill_ahead_share,
        ),
    )


def fleet_2p2d(
    node: NodeShape,
    *,
    network: NetworkModel | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
    forward_fault: float = 0.0,
) -> WatchedFleet:
    shape = FleetShape(
        num_prefill=2, num_decode=2, prefill=node, decode=node, network=network or NetworkModel()
    )
    return WatchedFleet(shape, COSTS, seed=seed, on_step=on_step, audits=True, forward_fault=forward_fault)


def assert_all_ended_and_empty(fleet: WatchedFleet) -> None:
    assert fleet.dispatcher.num_running == 0
    for outcome in fleet.outcomes.values():
        assert outcome.ended_at is not None, f"{outcome.rid} has not ended"
        assert outcome.finish is None or outcome.error is None
    for node in fleet.nodes.values():
        assert is_empty(node), f"{node.ref.node_id} still holds {list(node.scheduler.reqs)}"
        audit_idle(node.ledger)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("place", list(Place))
def test_one_fault_at_each_place(place: Place, fault: Fault) -> None:
    saboteur = Saboteur(place, fault, nth=2)
    on_host = place in (Place.ON_HOST, Place.COPIED_BACK)
    shape = small(
        retract_every=3 if on_host or place is Place.RETRACTED else 0,
        host_kv_tokens=256 if on_host else 0,
        # What was computed ahead leaves so little to compute that no request waits.
        prefill_ahead_share=0.0 if place is Place.WAITING else 0.25,
    )
    fleet = fleet_2p2d(shape, on_step=saboteur.look)
    saboteur.fleet = fleet
    num_requests = 160 if place in (Place.AHEAD, Place.WAITING) else 80  # it takes a while until one is there
    fleet.submit(chats(random.Random(3), num_requests, gap_s=0.004, block_tokens=BLOCK_TOKENS))
    fleet.run()
    assert saboteur.victim is not None, f"no request was ever in {place}"
    assert_all_ended_and_empty(fleet)
    hurt = [outcome for outcome in fleet.outcomes.values() if not outcome.ok]
    if fault in (Fault.ABORT, Fault.STOP, Fault.BREAK):
        assert len(hurt) <= 1
    later = [o for o in fleet.outcomes.values() if o.started_at > saboteur.struck_at + NOTICED_S]
    assert later and all(outcome.ok for outcome in later), "the fleet did not go on"
    check_end_of_victim(fault, fleet.outcomes[saboteur.victim.rid])


def check_end_of_victim(fault: Fault, outcome: Outcome) -> None:
    """How the client of the victim sees it, unless it had its last token already."""
    if outcome.ok:
        return
    if fault is Fault.STOP:
        assert outcome.error is None
        return
    assert outcome.error is not None
    wanted = {Fault.ABORT: {499}, Fault.BREAK: {503}, Fault.FORWARD: {500}, Fault.KILL: {503}}
    assert outcome.error.status in wanted[fault], outcome.error


@pytest.mark.parametrize("seed", range(16))
def test_many_faults_at_random(seed: int) -> None:
    rng = random.Random(seed)
    node = small(
        pool_tokens=rng.choice([96, 128, 400]),
        host_kv_tokens=rng.choice([0, 16, 256]),
        retract_every=rng.choice([0, 3, 7]),
        overlap=rng.random() < 0.7,
    )
    network = FaultyNetwork(
        latency_s=0.0001,
        jitter_s=rng.choice([0.0, 0.02]),
        bandwidth_bytes_s=rng.choice([1e7, 1e9]),
        transfer_fault=rng.choice([0.0, 0.01, 0.05]),
    )
    forward_fault = rng.choice([0.0, 0.02])
    fleet = fleet_2p2d(node, network=network, seed=seed, forward_fault=forward_fault)
    requests = chats(rng, 80, gap_s=rng.choice([0.005, 0.05]), block_tokens=BLOCK_TOKENS, output_len=(1, 24))
    fleet.submit(requests)
    end_s = requests[-1].at_s
    num_kills = rng.randrange(4)
    for i in range(num_kills):
        fleet.loop.at(rng.uniform(0, end_s), kill_and_replace, fleet, f"again{i}")
    ended_by_us: set[str] = set()
    for _ in range(12):
        fleet.loop.at(rng.uniform(0, end_s), hang_up_or_stop, fleet, ended_by_us)
    fleet.run()
    assert_all_ended_and_empty(fleet)
    others = [outcome for outcome in fleet.outcomes.values() if outcome.rid not in ended_by_us]
    if num_kills == 0 and network.transfer_fault == forward_fault == 0.0:
        assert all(outcome.ok for outcome in others)
    assert sum(outcome.ok for outcome in others) > len(others) // 10, "faults are rarer than that"


def kill_and_replace(fleet: WatchedFleet, name: str) -> None:
    victim = fleet.nodes[fleet.random.choice(sorted(fleet.nodes))]
    fleet.kill(victim.ref.node_id)
    fleet.start(f"{victim.ref.node_id[0]}-{name}", victim.role)


def hang_up_or_stop(fleet: WatchedFleet, ended_by_us: set[str]) -> None:
    live = [outcome for outcome in fleet.outcomes.values() if outcome.req is not None]
    if not live:
        return
    outcome = fleet.random.choice(live)
    ended_by_us.add(outcome.rid)
    assert outcome.req is not None
    if fleet.random.random() < 0.5:
        fleet.dispatcher.release(outcome.req)
    else:
        fleet.dispatcher.stop(outcome.req, outcome.num_tokens)


def test_a_leak_would_be_noticed() -> None:
    fleet = fleet_2p2d(small())
    fleet.submit(chats(random.Random(0), 5, gap_s=0.01, block_tokens=BLOCK_TOKENS))
    fleet.loop.at(0.05, fleet.nodes["p0000"].ledger.allocator.alloc, 1)
    with pytest.raises(LeakError, match="with none"):
        fleet.run()
