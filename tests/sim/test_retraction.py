"""Memory pressure on a decode node with transfers around it: arrivals, aborts and lost routers at any moment."""

from __future__ import annotations

from typing import Any

from shared.config import NodeConfig
from shared.protocol.messages import PROTOCOL_VERSION, Ping, ReqKey, RouterHello
from tests.cluster import Cluster, Node, small_config
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
