"""A request that runs alone on a decode node, since it may be what crashed others."""

from __future__ import annotations

import random

import pytest

from decode_node.trial import EMPTY_S, LEAVE_S
from planner.simulator.fleet import FleetShape
from shared.protocol.messages import Cancel, ReqKey, Role
from tests.cluster import Cluster
from tests.sim.test_moves import config, params, prompt, wanted
from tests.sim.test_simulator_faults import BLOCK_TOKENS, COSTS, assert_all_ended_and_empty, small
from tests.sim.watched_fleet import WatchedFleet, WatchedNode
from tests.sim.workloads import chats
from tests.token_engine import token_engine

NUM_NEW, ALONE = 60, 8
POISON, POISONED = "100", 8
"""A decode node that runs this request crashes; all have that many tokens of output at least."""


def submit(cluster: Cluster, rid: str, *, seed: int, alone_tokens: int = 0) -> ReqKey:
    sampling = params(NUM_NEW)
    return cluster.router.submit(rid, prompt(seed), sampling, None, "d0", alone_tokens=alone_tokens)


def is_handed_back(cluster: Cluster, key: ReqKey) -> bool:
    return [failed.handed_back for failed in cluster.router.answers[key].failures] == [True]


def test_what_comes_while_it_runs_alone_is_handed_back() -> None:
    with Cluster(0, 1, token_engine, config()) as cluster:
        answers = cluster.router.answers
        suspect = submit(cluster, "suspect", seed=0, alone_tokens=ALONE)
        early, other_suspect = submit(cluster, "a", seed=1), submit(cluster, "b", seed=2, alone_tokens=ALONE)
        cluster.run(lambda: len(answers[suspect].token_ids) >= ALONE)
        assert cluster.router.alone == [suspect]
        assert is_handed_back(cluster, early) and is_handed_back(cluster, other_suspect)
        late = submit(cluster, "late", seed=3)
        cluster.run_all(check=True)
        assert cluster.tokens(suspect) == wanted(prompt(0), NUM_NEW)
        assert cluster.tokens(late) == wanted(prompt(3), NUM_NEW)
        cluster.assert_idle()


def test_one_that_has_output_already_runs_alone_for_as_long() -> None:
    """Its tokens count from where it goes on, not from its first."""
    known = wanted(prompt(0), NUM_NEW)[: 2 * ALONE]
    with Cluster(0, 1, token_engine, config()) as cluster:
        answers = cluster.router.answers
        suspect = cluster.router.submit(
            "suspect", prompt(0), params(NUM_NEW), None, "d0", output_ids=known, alone_tokens=ALONE
        )
        early = submit(cluster, "early", seed=1)
        cluster.run(lambda: len(answers[suspect].token_ids) >= 3 * ALONE)
        assert cluster.router.alone == [suspect] and is_handed_back(cluster, early)
        late = submit(cluster, "late", seed=3)
        cluster.run_all(check=True)
        assert cluster.tokens(suspect) == wanted(prompt(0), NUM_NEW)
        assert cluster.tokens(late) == wanted(prompt(3), NUM_NEW)


def test_a_node_is_emptied_for_it() -> None:
    with Cluster(0, 1, token_engine, config()) as cluster:
        router = cluster.router
        others = [submit(cluster, f"r{i}", seed=i) for i in range(1, 4)]
        cluster.run(lambda: all(router.answers[key].token_ids for key in others))
        suspect = submit(cluster, "suspect", seed=0, alone_tokens=ALONE)
        cluster.run(lambda: set(others) <= set(router.wanted_moved))
        assert not router.alone and not any(router.answers[key].failures for key in others)
        cluster.network.advance(EMPTY_S)
        cluster.run_all(check=True)
        assert router.alone == [suspect] and all(is_handed_back(cluster, key) for key in others)
        assert cluster.tokens(suspect) == wanted(prompt(0), NUM_NEW)
        cluster.assert_idle()


@pytest.mark.parametrize("num_others", [0, 2])
def test_its_router_has_heard_that_it_is_alone_before_it_begins(num_others: int) -> None:
    """A crash in the first forward takes along what has not left the process."""
    with Cluster(0, 1, token_engine, config()) as cluster:
        router = cluster.router
        others = [submit(cluster, f"r{i}", seed=1 + i) for i in range(num_others)]
        suspect = submit(cluster, "suspect", seed=0, alone_tokens=ALONE)
        cluster.run(lambda: router.alone == [suspect])
        began_at = cluster.network.clock.now
        cluster.run(lambda: bool(router.answers[suspect].token_ids))
        assert cluster.network.clock.now >= began_at + LEAVE_S
        cluster.run_all(check=True)
        assert cluster.tokens(suspect) == wanted(prompt(0), NUM_NEW)
        assert all(cluster.tokens(key) == wanted(prompt(1 + i), NUM_NEW) for i, key in enumerate(others))


def test_a_node_is_emptied_for_each_of_two() -> None:
    with Cluster(0, 1, token_engine, config()) as cluster:
        router = cluster.router
        first = submit(cluster, "first", seed=0, alone_tokens=ALONE)
        cluster.run_all()
        other = submit(cluster, "other", seed=1)
        cluster.run(lambda: bool(router.answers[other].token_ids))
        second = submit(cluster, "second", seed=2, alone_tokens=ALONE)
        cluster.run_all(check=True)
        assert router.alone == [first, second]
        assert cluster.tokens(second) == wanted(prompt(2), NUM_NEW)
        cluster.assert_idle()


@pytest.mark.parametrize("waits", [False, True])
def test_a_node_takes_others_again_when_it_is_cancelled(waits: bool) -> None:
    with Cluster(0, 1, token_engine, config()) as cluster:
        answers = cluster.router.answers
        other = submit(cluster, "other", seed=1)
        cluster.run(lambda: bool(answers[other].token_ids))
        if not waits:
            cluster.run_all()
        suspect = submit(cluster, "suspect", seed=0, alone_tokens=ALONE)
        cluster.run(lambda: bool(cluster.router.wanted_moved if waits else answers[suspect].token_ids))
        cluster.router.outbox.send("d0", Cancel(suspect))
        cluster.router.give_up(suspect, "its client is gone")
        late = submit(cluster, "late", seed=2)
        cluster.run_all(check=True)
        assert cluster.tokens(late) == wanted(prompt(2), NUM_NEW)
        cluster.assert_idle()


def test_poison_in_a_busy_fleet_is_convicted_at_the_third_node() -> None:
    killed: list[str] = []

    def on_step(node: WatchedNode) -> None:
        running = node.scheduler.batcher.running_batch if node.role is Role.DECODE else ()
        if any(req.key.rid == POISON and req.output_len >= 3 for req in running):
            killed.append(node.ref.node_id)
            fleet.kill(node.ref.node_id)

    shape = small(pool_tokens=400)
    fleet = WatchedFleet(
        FleetShape(num_prefill=2, num_decode=8, prefill=shape, decode=shape),
        COSTS,
        on_step=on_step,
        audits=True,
    )
    rng = random.Random(0)
    fleet.submit(chats(rng, 300, gap_s=0.004, block_tokens=BLOCK_TOKENS, output_len=(POISONED, 24)))
    fleet.run()
    assert_all_ended_and_empty(fleet)
    poison = fleet.outcomes[POISON]
    assert poison.error is not None and poison.error.code == "poison_request" and len(killed) == 3
    assert all(outcome.ok for outcome in fleet.outcomes.values() if outcome is not poison)
