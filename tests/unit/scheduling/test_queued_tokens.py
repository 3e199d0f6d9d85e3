"""The prompt tokens that a node has still to compute. page_size is 4."""

from __future__ import annotations

import pytest

from shared.engine.vitals import QueuedTokens
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster
from tests.sim.test_races import config
from tests.token_engine import token_engine
from tests.unit.scheduling.conftest import MakeLedger, MakeReq, cache_prefix


def test_they_leave_as_their_kv_grows(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger = make_kv_ledger(64, num_rows=4)
    queued = QueuedTokens(ledger)
    one, other = make_req(20), make_req(6)
    cache_prefix(ledger, one.ids[:8])
    queued.add(one)
    queued.add(other)
    assert queued.total == 12 + 6, "but for the pages that are cached"
    one.kv = ledger.admit(ledger.match_prefix(one.ids, ""), "")
    assert one.kv is not None
    for committed, left in ((8, 12), (15, 5), (20, 0), (24, 0)):
        one.kv.kv_committed_len = committed
        queued.computed([one])
        assert queued.total == left + 6
    queued.remove(other)
    queued.remove(other)
    queued.remove(one)
    assert queued.total == 0


@pytest.mark.parametrize("prefill", ["p0", None])
def test_a_node_tells_them_while_they_wait(prefill: str | None) -> None:
    with Cluster(1, 1, token_engine, config(page_size=4)) as cluster:
        prompt = list(range(100, 130))
        for rid in "abc":
            cluster.router.submit(
                rid, [ord(rid), *prompt], SamplingParams(max_new_tokens=4, temperature=0.0), prefill, "d0"
            )
        node = cluster.nodes[prefill or "d0"]
        most = 0
        while not all(answer.ended for answer in cluster.router.answers.values()):
            cluster.step()
            most = max(most, node.vitals.load().num_queued_tokens)
        cluster.step()
        assert most == 3 * 31
        assert node.vitals.load().num_queued_tokens == 0
