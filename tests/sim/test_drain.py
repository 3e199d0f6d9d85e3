"""Nodes that are drained: what waits on a prefill node is handed back."""

from __future__ import annotations

from shared.protocol.messages import Drain, ReqKey
from tests.cluster import Cluster
from tests.sim.test_moves import config, params, prompt, wanted
from tests.token_engine import token_engine

NUM_NEW = 60


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
