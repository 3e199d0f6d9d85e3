"""Of a prompt that two nodes have cached, one evicts its pages before all others, once the other has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Done, Grant
from tests.cluster import Cluster
from tests.sim.test_moves import config, params, prompt
from tests.token_engine import token_engine

POOL, OLDER, NEWER, MORE = 200, prompt(1, 60), prompt(2, 60), prompt(3, 120)
"""A pool has room for OLDER and NEWER with their answers, but not for MORE besides."""


@contextmanager
def fleet(num_decode: int = 1) -> Iterator[Cluster]:
    """p0 and d0, which have computed OLDER."""
    with Cluster(1, num_decode, token_engine, config(tokens=POOL)) as cluster:
        run(cluster, "older", OLDER)
        yield cluster
        cluster.run_all()
        cluster.assert_idle()


def run(cluster: Cluster, rid: str, ids: list[int], evicts_first: str | None = None) -> ReqKey:
    key = cluster.router.submit(rid, ids, params(4), "p0", "d0", evicts_first=evicts_first)
    cluster.run(lambda: cluster.router.answers[key].ended)
    cluster.run_all()
    return key


def has(cluster: Cluster, name: str, ids: list[int]) -> bool:
    """Whether a node has all of a prompt cached."""
    ledger = cluster.nodes[name].engine.ledger
    return ledger.radix_cache.peek(ids, len(ids)).num_pages == len(ids) // ledger.page_size


@pytest.mark.parametrize("evicts_first", ["p0", "d0", None])
def test_one_node_keeps_it(evicts_first: str | None) -> None:
    with fleet() as cluster:
        run(cluster, "newer", NEWER, evicts_first)
        assert all(has(cluster, name, ids) for name in ("p0", "d0") for ids in (OLDER, NEWER))
        run(cluster, "more", MORE)
        for name in ("p0", "d0"):
            assert has(cluster, name, NEWER) == (name != evicts_first)
            assert has(cluster, name, OLDER) == (name == evicts_first)


@pytest.mark.parametrize("message", [Grant, Done], ids=["before it has come", "before that is known"])
def test_a_prefill_node_keeps_what_the_decode_node_may_not_have(message: type) -> None:
    with fleet() as cluster:
        cluster.network.hold(message)
        key = cluster.router.submit("newer", NEWER, params(4), "p0", "d0", evicts_first="p0")
        cluster.run(lambda: cluster.network.num_held(message) > 0 and has(cluster, "p0", NEWER))
        cluster.router.give_up(key, "the client went away")
        for _ in range(10):
            cluster.step()
        cluster.network.release(message)
        cluster.run_all()
        run(cluster, "more", MORE)
        assert has(cluster, "p0", NEWER) and not has(cluster, "p0", OLDER)


def test_a_node_that_a_request_has_left_evicts_it_first() -> None:
    with fleet(num_decode=2) as cluster:
        key = cluster.router.submit("newer", NEWER, params(40), "p0", "d0")
        cluster.run(lambda: len(cluster.tokens(key)) > 2)
        cluster.router.move(key, "d0", "d1")
        cluster.run_all()
        run(cluster, "more", MORE)
        assert has(cluster, "d0", OLDER) and not has(cluster, "d0", NEWER)
        assert has(cluster, "d1", NEWER)
