"""Nodes that are drained: what waits on a prefill node is handed back."""

from __future__ import annotations

from planner.cost_model import CostModel
from planner.simulator.fleet import FleetShape
from planner.traffic.trace import SimRequest
from router.dispatch.node import Loss
from shared.protocol.messages import Drain, ReqKey
from tests.cluster import Cluster
from tests.sim.faults import is_empty
from tests.sim.test_moves import config, params, prompt, wanted
from tests.sim.watched_fleet import WatchedFleet, WatchedNode
from tests.token_engine import token_engine

NUM_NEW = 60
COSTS = CostModel(a=0.004, b=2e-5, c=0.0, d=0.004, e=1e-4, f=0.0, step_s=0.0005)


def submit(cluster: Cluster, num: int, *, prefill: str = "p0", decode: str = "d0") -> dict[ReqKey, list[int]]:
    ids = [prompt(i, 10 + 5 * i) for i in range(num)]
    return {
        cluster.router.submit(f"r{i}", ids[i], params(NUM_NEW), prefill, decode): ids[i] for i in range(num)
    }


def test_a_prefill_node_hands_back_what_it_has_not_begun() -> None:
    """What it has begun it finishes. A request that was under way to it is handed back as well."""
    with Cluster(1, 1, token_engine, config(tokens=200, slots=2)) as cluster:
        router = cluster.router
        ids = submit(cluster, 6)
        cluster.run(lambda: any(router.answers[key].token_ids for key in ids))
        router.outbox.send("p0", Drain(60.0))
        late = router.submit("late", prompt(9), params(NUM_NEW), "p0", "d0")
        cluster.run_all(check=True)
        handed_back = {key for key in (*ids, late) if router.answers[key].failures}
        assert late in handed_back
        assert 1 < len(handed_back) < 7
        for key in handed_back:
            assert [
                (failed.status, failed.handed_back, "draining" in failed.message)
                for failed in router.answers[key].failures
            ] == [(503, True, True)]
        for key in ids.keys() - handed_back:
            assert cluster.tokens(key) == wanted(ids[key], NUM_NEW)
        cluster.assert_idle()


def drain(fleet: WatchedFleet, node: WatchedNode, timeout_s: float) -> None:
    """A node gets nothing new, moves or finishes what it holds, and leaves: as by `FleetChanges`."""
    fleet.live.of[node.role].remove(node)
    node.send(Drain(timeout_s))
    until = fleet.loop.now + timeout_s

    def look() -> None:
        if fleet.loop.now >= until:
            fleet.dispatcher.fail_over_held(node, "the time is up")
        if fleet.dispatcher.num_held(node):
            fleet.dispatcher.move_held(node)
            fleet.loop.at(fleet.loop.now + 0.05, look)
            return
        del fleet.nodes[node.ref.node_id]
        node.alive = False
        fleet.transport.kill(node.ref.node_id)
        fleet.dispatcher.on_node_lost(node, "drained", Loss.LEFT)

    look()


def test_a_simulated_node_that_is_drained_leaves_when_it_is_empty() -> None:
    """Of each role, under load: nothing is lost, what runs moves, and the node's pages are not missed."""
    fleet = WatchedFleet(FleetShape(num_prefill=2, num_decode=2), COSTS)
    requests = [SimRequest(0.1 * i, 300, 200, tuple(range(100 * i, 100 * i + 10)), 32) for i in range(40)]
    fleet.submit(requests)
    fleet.run(until=2.0)
    assert not is_empty(fleet.nodes["d0001"])
    for name in ("p0001", "d0001"):
        drain(fleet, fleet.nodes[name], timeout_s=5.0)
    fleet.run(until=fleet.loop.now + 5.5)
    assert set(fleet.nodes) == {"p0000", "d0000"}
    fleet.run()
    assert len(fleet.outcomes) == 40 and all(outcome.ok for outcome in fleet.outcomes.values())
    assert all(map(is_empty, fleet.nodes.values()))
