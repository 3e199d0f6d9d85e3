"""Memory pressure on a decode node with transfers around it: arrivals, aborts and lost routers at any moment."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.config import NodeConfig
from shared.protocol.messages import PROTOCOL_VERSION, Finish, Ping, ReqKey, RouterHello
from tests.cluster import Cluster, Node, small_config
from tests.fake_network import Faults
from tests.sim.test_moves import params, prompt
from tests.token_engine import reference_tokens, token_engine


def config(policy: str, *, tokens: int = 96, wait_steps: int = 16, **options: Any) -> NodeConfig:
    own = {"host_tokens": 256, "context_length": 96, **options}
    return small_config(tokens=tokens, retract_policy=policy, retracted_wait_steps=wait_steps, **own)


def crowd(
    cluster: Cluster, num: int = 4, length: int = 18, max_new_tokens: int = 40
) -> dict[ReqKey, list[int]]:
    """Requests that the pool holds when they start, and not when they have grown."""
    wanted = {}
    for i in range(num):
        ids = prompt(i, length)
        key = cluster.router.submit(f"r{i}", ids, params(max_new_tokens), "p0", "d0")
        wanted[key] = reference_tokens(ids, max_new_tokens, eos=None)
    return wanted


def on_host(node: Node) -> list[ReqKey]:
    return [key for key, req in node.scheduler.reqs.items() if req.host_pages]


def test_what_happened_is_told_with_every_pong() -> None:
    decode_config = config("host")
    with Cluster(1, 1, token_engine, config("recompute", tokens=400), decode_config=decode_config) as cluster:
        crowd(cluster)
        d0 = cluster.nodes["d0"]
        cluster.run(lambda: bool(on_host(d0)))
        cluster.router.outbox.send("d0", Ping(1))
        cluster.step()
        cluster.step()
        load = cluster.router.loads["d0"]
        assert load.num_retractions == load.num_retractions_host == 1 and load.num_retractions_recompute == 0
        assert load.num_retracted == 1 <= load.num_waiting
        assert load.num_host_pages == 64 and load.num_free_host_pages < 64
        cluster.run_all(check=True)
        cluster.assert_idle()
        cluster.step()  # the answer to its last Ping is on its way
        load = cluster.router.loads["d0"]
        assert load.num_free_host_pages == 64 and load.num_retracted == 0


def test_a_router_that_is_lost_leaves_nothing_on_the_host() -> None:
    decode_config = config("host")
    with Cluster(1, 1, token_engine, config("recompute", tokens=400), decode_config=decode_config) as cluster:
        crowd(cluster)
        d0 = cluster.nodes["d0"]
        cluster.run(lambda: bool(on_host(d0)))
        d0.router_port.on_message("router", RouterHello("router", PROTOCOL_VERSION))
        cluster.run_all()
        assert d0.engine.ledger.host.num_held == 0
        cluster.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_that_fails_is_an_error_to_one_client(overlap: bool) -> None:
    decode_config = config("host", overlap=overlap)
    with Cluster(1, 1, token_engine, config("recompute", tokens=400), decode_config=decode_config) as cluster:
        wanted = crowd(cluster)
        cluster.nodes["d0"].engine.stream.fail_copies = [False, True]
        cluster.run_all(check=True)
        failed = [key for key, answer in cluster.router.answers.items() if answer.failures]
        assert len(failed) == 1
        assert [f.status for f in cluster.router.answers[failed[0]].failures] == [500]
        assert "copy of its KV" in cluster.router.answers[failed[0]].failures[0].message
        for key in set(wanted) - set(failed):
            assert cluster.tokens(key) == wanted[key]
        cluster.assert_idle()


def test_pages_that_are_being_copied_are_no_arrivals_pages() -> None:
    """A transfer writes from outside the forward stream, where a copy may still be reading."""
    decode_config = config("host", overlap=False)
    with Cluster(1, 1, token_engine, config("recompute", tokens=400), decode_config=decode_config) as cluster:
        crowd(cluster)
        scheduler = cluster.nodes["d0"].scheduler
        cluster.run(lambda: len(scheduler.batcher.running_batch) == 4)
        allocator = scheduler.batcher.retraction._ledger.allocator
        before = allocator.num_free_for_arrivals
        scheduler.batcher._retract(scheduler.batcher.running_batch[0])
        scheduler.batcher.retraction._ledger.flush()
        assert allocator.num_free_for_arrivals == before < allocator.num_free
        cluster.run_all(check=True)
        cluster.assert_idle()


@pytest.mark.parametrize("wait_steps", [0, 10])
@pytest.mark.parametrize("policy", ["host", "recompute"])
def test_neither_arrivals_nor_retracted_requests_starve(policy: str, wait_steps: int) -> None:
    """Short requests arrive all the time: they pass a retracted one for `wait_steps` forwards, no longer."""
    decode_config = config(policy, wait_steps=wait_steps, slots=16, headroom=1)
    with Cluster(1, 1, token_engine, config("recompute", tokens=800), decode_config=decode_config) as cluster:
        scheduler = cluster.nodes["d0"].scheduler
        retraction = scheduler.batcher.retraction
        wanted = crowd(cluster, num=3, length=14, max_new_tokens=70)
        long = set(wanted)
        longest, passed = 0, []
        for step in range(3000):
            if step % 4 == 0 and len(scheduler.prealloc_queue) < 3:
                ids = prompt(1000 + step, 3)
                key = cluster.router.submit(f"s{step}", ids, params(3), "p0", "d0")
                wanted[key] = reference_tokens(ids, 3, eos=None)
            queue, before = list(retraction._queue), set(scheduler.transfer_queue)
            # Arrivals reserve room ahead of the decision, so by what was true a turn ago.
            waits = [retraction._num_forwards - req.stalled_since for req in queue]
            cluster.step(check=False)
            longest = max([longest, *waits])
            if waits and set(scheduler.transfer_queue) - before:
                passed.append(max(waits))
            if all(cluster.router.answers[key].ended for key in long):
                break
        else:
            raise AssertionError("a retracted request starves")
        assert retraction.count.num_host + retraction.count.num_recompute > 0
        assert all(waited < wait_steps for waited in passed)
        assert bool(passed) == (wait_steps > 0)
        # Due after `wait_steps`, it waits for those who run and those in transfer by then: all have an end.
        assert longest <= wait_steps + 2 * 70 + 40
        cluster.run_all()
        for key, tokens in wanted.items():
            assert cluster.tokens(key) == tokens
        cluster.assert_idle()


@pytest.mark.parametrize("seed", range(6))
def test_random_work_with_faults_and_deaths(seed: int) -> None:
    rng = random.Random(seed)
    decode_config = config(
        ["host", "auto", "recompute"][seed % 3],
        tokens=rng.choice([96, 160]),
        host_tokens=rng.choice([16, 64, 512]),
        page_size=rng.choice([1, 4, 16]),
        overlap=rng.random() < 0.7,
        wait_steps=rng.choice([0, 3, 30]),
        retract_every=rng.choice([0, 0, 4]),
        headroom=rng.choice([0, 4]),
    )
    page_size = decode_config.cache.page_size
    faults = Faults(delay_s=(0.0001, rng.choice([0.002, 0.02])), silent_kill=False)
    with Cluster(
        1,
        1,
        token_engine,
        config("recompute", tokens=640, page_size=page_size),
        decode_config=decode_config,
        seed=seed,
        faults=faults,
    ) as cluster:
        if rng.random() < 0.5:
            cluster.nodes["d0"].scheduler.batcher.retraction.costs.prefill.observe(1e9, 1)
        wanted: dict[ReqKey, list[int]] = {}
        cancelled: set[ReqKey] = set()
        for step in range(600):
            if step < 400 and rng.random() < 0.12:
                ids, n = prompt(rng.randrange(10**6), rng.randint(3, 40)), rng.randint(2, 40)
                source = rng.choice(["p0", "p0", None])
                key = cluster.router.submit(f"r{step}", ids, params(n), source, "d0")
                wanted[key] = reference_tokens(ids, n, eos=None)
            running = [key for key in wanted if not cluster.router.answers[key].ended]
            if running and rng.random() < 0.02:
                key = rng.choice(running)
                cluster.router.cancel(key)
                cluster.router.answers[key].finish = Finish("abort")
                cancelled.add(key)
            cluster.step(0.002, check=step % 10 == 0)
        cluster.run_all()
        for key, tokens in wanted.items():
            got = cluster.router.answers[key]
            assert not got.failures, got.failures
            assert got.token_ids == (tokens[: len(got.token_ids)] if key in cancelled else tokens), key
        cluster.assert_idle()
