"""Priority across the fleets: on a decode node most requests arrive by transfer, not through the waiting queue."""

from __future__ import annotations

import pytest

from shared.protocol.messages import Ping, ReqKey
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster, small_config
from tests.token_engine import reference_tokens, token_engine

NUM_NEW = 40


class Runner:
    """1P1D; the decode node's pool holds three requests of 40 tokens to begin with."""

    def __init__(self, num_tokens: int = 132, **schedule: object) -> None:
        own = {"slots": 16, "chunk": 512, "headroom": 0, **schedule}
        prefill, decode = small_config(tokens=4096, **own), small_config(tokens=num_tokens, **own)  # type: ignore[arg-type]
        self.cluster = Cluster(1, 1, token_engine, prefill, decode_config=decode)
        self.prompts: dict[ReqKey, list[int]] = {}

    def submit(self, rid: str, priority: int, *, num_ids: int = 40) -> ReqKey:
        ids = [(31 * len(self.prompts) + i) % 997 for i in range(num_ids)]
        params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        key = self.cluster.router.submit(rid, ids, params, "p0", "d0", priority=priority)
        self.prompts[key] = ids
        return key

    def num_known(self, key: ReqKey) -> int:
        return len(self.cluster.router.answers[key].token_ids)

    def until_known(self, key: ReqKey, num_tokens: int) -> None:
        self.cluster.run(lambda: self.num_known(key) >= num_tokens)

    def finish(self) -> None:
        self.cluster.run_all()
        self.cluster.assert_idle()
        for key, ids in self.prompts.items():
            assert self.cluster.tokens(key) == reference_tokens(ids, NUM_NEW, None), key
        self.cluster.close()

    @property
    def num_retractions(self) -> int:
        return self.cluster.nodes["d0"].scheduler.batcher.num_retractions


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_an_arrival_of_high_priority_takes_the_place_of_a_low_one(enabled: bool, overlap: bool) -> None:
    runner = Runner(enable_priority_scheduling=enabled, priority_aging_steps=0, overlap=overlap)
    low = [runner.submit(f"low{i}", 0) for i in range(3)]
    for key in low:
        runner.until_known(key, 2)
    high = runner.submit("high", 50)
    runner.until_known(high, 2)  # the first comes from the prefill node
    assert (
        max(map(runner.num_known, low)) < NUM_NEW // 2
    ) is enabled  # later they outgrow the pool by themselves
    runner.finish()


def test_the_higher_arrival_goes_first() -> None:
    """Nobody is retracted for it, since the difference is too small; but it passes those who wait."""
    runner = Runner(num_tokens=104, enable_priority_scheduling=True)
    first = runner.submit("first", 0, num_ids=60)
    runner.until_known(first, 2)
    waiting = [runner.submit(f"low{i}", 0, num_ids=60) for i in range(2)]
    runner.cluster.run(lambda: len(runner.cluster.nodes["d0"].scheduler.prealloc_queue) == 2)
    high = runner.submit("high", 5, num_ids=60)
    runner.until_known(high, 1)
    assert runner.num_retractions == 0
    assert runner.num_known(first) == NUM_NEW
    assert [runner.num_known(key) for key in waiting] == [0, 0]
    runner.finish()


def test_nobody_is_retracted_for_one_that_would_not_fit_even_so() -> None:
    """The pool has 132 tokens; 40 of them belong to one that counts as much, so 100 cannot be had."""
    runner = Runner(enable_priority_scheduling=True, priority_aging_steps=0)
    equal, low = runner.submit("equal", 50), runner.submit("low", 0)
    for key in (equal, low):
        runner.until_known(key, 2)
    high = runner.submit("high", 50, num_ids=90)
    runner.cluster.run(lambda: runner.cluster.nodes["d0"].scheduler.prealloc_queue.first is not None)
    for _ in range(5):
        runner.cluster.step()
    assert runner.num_retractions == 0
    runner.until_known(high, NUM_NEW)
    runner.finish()


def test_the_node_tells_which_policy_is_in_effect() -> None:
    """The router shows a node's load in /get_server_info."""
    for disabled, policy in ((False, "lpm"), (True, "fcfs")):
        config = small_config(keeps_prefixes=not disabled, schedule_policy="lpm")
        with Cluster(1, 1, token_engine, config) as cluster:
            cluster.step()
            for name in ("p0", "d0"):
                cluster.router.outbox.send(name, Ping(1))
            cluster.run(lambda cluster=cluster: len(cluster.router.loads) == 2)
            assert {load.schedule_policy for load in cluster.router.loads.values()} == {policy}
