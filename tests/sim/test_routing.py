"""What routing by `ttft` does to a whole fleet: no node is overrun, and no conversation is sent to and fro."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import pytest

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.simulator.node import NodeShape
from planner.simulator.transport import NetworkModel
from planner.traffic.trace import SimRequest
from router.dispatch.placement import POLICIES
from shared.config import ScheduleOptions
from shared.protocol.messages import Role
from tests.bench.recorded import load_trace, scaled
from tests.sim.test_simulator_faults import assert_all_ended_and_empty
from tests.sim.watched_fleet import FaultyNetwork, WatchedFleet
from tests.sim.workloads import chats, few_shot

COSTS = CostModel(a=0.0073, b=1.4e-4, c=1.6e-9, d=0.0097, e=2.3e-4, f=3.8e-6)

BLOCK = 32


def fleet(
    num_each: int,
    policy: str = "ttft",
    seed: int = 0,
    pool_tokens: int = 32_768,
    network: NetworkModel | None = None,
    audits: bool = False,
) -> WatchedFleet:
    node = NodeShape(pool_tokens=pool_tokens, schedule=ScheduleOptions(max_running_requests=64))
    shape = FleetShape(
        num_prefill=num_each,
        num_decode=num_each,
        prefill=node,
        decode=node,
        local_prefill_tokens=None,
        prefill_policy=policy,
        decode_policy=policy,
        network=network or NetworkModel(),
    )
    return WatchedFleet(shape, COSTS, seed=seed, audits=audits)


def requests_by_node(fleet: WatchedFleet, role: Role) -> dict[str, int]:
    """How many requests each node has had."""
    return {name: len(node.rids) for name, node in fleet.nodes.items() if node.role is role}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_while_nodes_come_and_go(policy: str) -> None:
    rng = random.Random(1)
    simulated = fleet(6, policy)
    simulated.submit(chats(rng, 300, gap_s=0.02, block_tokens=BLOCK, num_prompts=6, output_len=(4, 40)))
    for i in range(8):
        role = (Role.PREFILL, Role.DECODE)[i % 2]
        simulated.run(until=0.6 * (i + 1))
        simulated.kill(rng.choice([name for name, node in simulated.nodes.items() if node.role is role]))
        simulated.start(f"{role[0]}-new-{i}", role)
    simulated.run()
    assert len(simulated.outcomes) == 300
    assert all(outcome.ok for outcome in simulated.outcomes.values())


def test_a_joining_node_gets_its_share_and_no_more() -> None:
    simulated = fleet(5)
    simulated.submit(
        chats(random.Random(2), 900, gap_s=0.01, block_tokens=BLOCK, num_prompts=40, output_len=(20, 60))
    )
    simulated.run(until=3.0)
    before = {role: requests_by_node(simulated, role) for role in Role}
    new = {role: simulated.start(f"{role[0]}-new", role) for role in Role}
    simulated.run()
    for role, node in new.items():
        got = requests_by_node(simulated, role)
        others = [got[name] - before[role][name] for name in before[role]]
        assert 0.5 * max(others) <= len(node.rids) <= 1.6 * max(others), (role, got)


def test_work_is_balanced_by_its_tokens() -> None:
    """Recorded prompts differ much in length: no prefill node has many more tokens to compute than another."""
    simulated = fleet(4, pool_tokens=65_536)
    simulated.submit(itertools.islice(scaled(load_trace(), rate=8.0), 700))
    simulated.run()
    computed = [
        node.vitals.num_prompt_tokens - node.vitals.num_cached_tokens
        for node in simulated.nodes.values()
        if node.role is Role.PREFILL
    ]
    assert max(computed) < 1.25 * min(computed)


def test_a_conversation_is_not_sent_to_and_fro() -> None:
    """While the fleet has time, every turn goes where the turns before it went."""
    simulated = fleet(4)
    rng = random.Random(3)
    homes = defaultdict(list)
    for turn in range(6):
        for chat in range(8):
            blocks = tuple(1000 * chat + block for block in range(4 * (turn + 1)))
            request = SimRequest(0.0, BLOCK * len(blocks), rng.randint(2, 6), blocks, BLOCK)
            sent = simulated.send(request)
            assert sent is not None and sent.req is not None
            homes[chat].append(sent.req.nodes[-1].ref.node_id)
            simulated.run()
    changes = sum(a != b for turns in homes.values() for a, b in itertools.pairwise(turns))
    assert changes == 0, homes
    assert set(Counter(turns[0] for turns in homes.values()).values()) == {2}, "and they are spread"


def test_both_fleets_together_hold_more_prompts_than_either() -> None:
    """Prompts in turn, of which a pool holds three quarters: where both fleets hold the same, LRU finds none."""
    simulated = fleet(1, pool_tokens=8192)
    for _ in range(3):
        for i in range(20):
            blocks = tuple(100 * i + block for block in range(16))
            simulated.send(SimRequest(0.0, BLOCK * len(blocks), 2, blocks, BLOCK))
            simulated.run()
    outcomes = list(simulated.outcomes.values())
    found = [outcome.cached_tokens > BLOCK for outcome in outcomes[20:]]
    assert sum(found) > 0.8 * len(found)


def num_fetched_tokens(fleet: WatchedFleet) -> int:
    """Prompt tokens that came from other nodes, to the prefill nodes that are there."""
    return sum(node.vitals.num_fetched_tokens for node in fleet.nodes.values())


@pytest.mark.parametrize("fault", ["deaths", "broken links", "none"])
def test_pages_are_fetched_while_lenders_die_and_links_break(fault: str) -> None:
    """A hot prefix is on one node first. Whatever becomes of a fetch, its request ends once, and no page is left."""
    rng = random.Random(5)
    network = FaultyNetwork(transfer_fault=0.02 if fault == "broken links" else 0.0)
    simulated = fleet(4, pool_tokens=8192, network=network, audits=True)
    simulated.submit(few_shot(rng, 300, gap_s=0.01, num_prompts=24))
    num_fetched = 0
    for i in range(6 if fault == "deaths" else 0):
        role = (Role.PREFILL, Role.DECODE)[i % 2]
        simulated.run(until=1.2 + 0.3 * i)
        names = [name for name, node in simulated.nodes.items() if node.role is role]
        lenders = [name for name in names if len(simulated.nodes[name].scheduler.lending)]
        name = rng.choice(lenders or names)
        num_fetched += simulated.nodes[name].vitals.num_fetched_tokens
        simulated.kill(name)
        simulated.start(f"{role[0]}-new-{i}", role)
    simulated.run()
    assert_all_ended_and_empty(simulated)
    hurt = [outcome for outcome in simulated.outcomes.values() if not outcome.ok]
    assert len(hurt) <= (20 if fault == "broken links" else 0), "a handoff that breaks fails its request"
    assert num_fetched + num_fetched_tokens(simulated) > 0
    if fault == "none":
        nbytes = sum(node.vitals.kv_bytes_transferred for node in simulated.nodes.values())
        assert nbytes == 2 * simulated.transport.nbytes, "what one node sends another one receives"
