"""What nodes tell of their prefixes, and what a decode node does with a request that counts on one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import PROTOCOL_VERSION, CacheEvents, Ping, ReqKey, RouterHello
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import ROUTER, Cluster
from tests.sim.test_races import config
from tests.token_engine import reference_tokens, token_engine

PAGE = 4
PROMPT = list(range(100, 130))
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0)


def follower_is_exact(cluster: Cluster, name: str) -> None:
    """Once everything has arrived, which takes more than one round when something was missed."""

    def exact() -> bool:
        held = cluster.nodes[name].engine.ledger.radix_cache.hashes()
        index = cluster.router.prefixes[name]
        return len(index) == len(held) and all(index.num_blocks([block]) for block in held)

    cluster.step()
    cluster.run(exact, max_steps=50)


@contextmanager
def pair_that_has_met(**options: int) -> Iterator[Cluster]:
    with Cluster(1, 1, token_engine, config(page_size=PAGE, **options)) as cluster:
        for name in ("p0", "d0"):
            cluster.router.outbox.send(name, RouterHello(ROUTER, PROTOCOL_VERSION))
        cluster.step()
        cluster.step()
        yield cluster


def served(
    cluster: Cluster, rid: str, ids: list[int], prefill: str | None, limit: int | None = None
) -> ReqKey:
    key = cluster.router.submit(rid, ids, PARAMS, prefill, "d0", local_prefill_limit=limit)
    cluster.run_all()
    return key


def test_a_follow_up_is_prefilled_beside_its_conversation() -> None:
    with pair_that_has_met() as cluster:
        first = served(cluster, "a", PROMPT, "p0")
        assert cluster.tokens(first) == reference_tokens(PROMPT, 12)
        follower_is_exact(cluster, "p0")
        follower_is_exact(cluster, "d0")
        longer = [*PROMPT, *cluster.tokens(first), 7, 8, 9]
        known = cluster.router.prefixes["d0"].num_blocks(list(block_hashes(longer, PAGE)))
        assert known == (len(PROMPT) + len(cluster.tokens(first)) - 1) // PAGE  # the last token has no KV
        key = served(cluster, "b", longer, None, limit=len(longer) - known * PAGE)
        assert cluster.tokens(key) == reference_tokens(longer, 12)
        assert cluster.router.answers[key].reports[-1].cached_tokens == known * PAGE
        assert cluster.router.not_cached == []
        cluster.assert_idle()


@pytest.mark.parametrize("lost", ["evicted", "never held"])
def test_a_promise_that_cannot_be_kept_is_declined_and_holds_nothing(lost: str) -> None:
    with pair_that_has_met() as cluster:
        if lost == "evicted":
            served(cluster, "a", PROMPT, "p0")
            cluster.nodes["d0"].engine.ledger.flush()
            follower_is_exact(cluster, "d0")
            assert len(cluster.router.prefixes["d0"]) == 0
        key = served(cluster, "b", PROMPT, None, limit=8)
        assert cluster.router.not_cached == [key]
        cluster.assert_idle()
        again = cluster.router.submit("b", PROMPT, PARAMS, "p0", "d0", attempt=1)
        cluster.run_all()
        assert cluster.tokens(again) == reference_tokens(PROMPT, 12)


def test_a_router_that_comes_later_is_told_everything() -> None:
    with Cluster(1, 1, token_engine, config(page_size=PAGE)) as cluster:
        served(cluster, "a", PROMPT, "p0")
        cluster.router.prefixes.clear()
        for name in ("p0", "d0"):
            cluster.router.outbox.send(name, RouterHello(ROUTER, PROTOCOL_VERSION))
        cluster.step()
        follower_is_exact(cluster, "d0")
        assert len(cluster.router.prefixes["d0"]) > 0


def test_a_router_that_missed_something_asks_for_everything() -> None:
    with pair_that_has_met() as cluster:
        served(cluster, "a", PROMPT, "p0")
        follower_is_exact(cluster, "d0")
        index = cluster.router.prefixes["d0"]
        cluster.router._on_message("d0", CacheEvents(index._seq + 2, (1, 2, 3), ()))  # type: ignore[operator]
        assert len(index) == 0
        follower_is_exact(cluster, "d0")
        assert len(index) > 0


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_router_that_missed_the_last_event_sees_so_in_a_pong(num_lost: int) -> None:
    """It cannot see a gap before the next event, which may never come; the first answer to it may be lost too."""
    with pair_that_has_met() as cluster:
        served(cluster, "a", PROMPT, "p0")
        follower_is_exact(cluster, "d0")
        cluster.network.drop_next(CacheEvents, num_lost)
        cluster.nodes["d0"].engine.ledger.flush()
        cluster.step()
        cluster.step()
        assert len(cluster.router.prefixes["d0"]) > 0, "nobody has told it"
        for n in range(10):
            cluster.router.outbox.send("d0", Ping(n))
            cluster.step()
            cluster.step()
        assert len(cluster.router.prefixes["d0"]) == 0
        served(cluster, "b", PROMPT, "p0")
        follower_is_exact(cluster, "d0")
        assert len(cluster.router.prefixes["d0"]) > 0


@pytest.mark.parametrize("seed", range(3))
def test_under_pressure_the_router_still_knows_exactly(seed: int) -> None:
    rng = random.Random(seed)
    with pair_that_has_met(tokens=160, retract_every=7) as cluster:
        for n in range(30):
            ids = [
                *PROMPT[: rng.randrange(4, 30)],
                *(rng.randrange(300) for _ in range(rng.randrange(1, 20))),
            ]
            cluster.router.submit(str(n), ids, PARAMS, rng.choice(["p0", None]), "d0")
            for _ in range(rng.randrange(8)):
                cluster.step()
        cluster.run_all()
        follower_is_exact(cluster, "d0")
        cluster.assert_idle()


@pytest.mark.parametrize("prefill", ["p0", None])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_every_prompt_is_counted_by_whoever_prefilled_it(prefill: str | None, max_new_tokens: int) -> None:
    with pair_that_has_met() as cluster:
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        for rid in ("a", "b"):
            cluster.router.submit(
                rid, PROMPT, params, prefill, None if prefill and max_new_tokens < 2 else "d0"
            )
            cluster.run_all()
        cluster.assert_idle()
        cluster.step()
        load = cluster.router.loads[prefill or "d0"]
        cached = (len(PROMPT) - 1) // PAGE * PAGE
        assert (load.num_prompt_tokens, load.num_cached_tokens) == (2 * len(PROMPT), cached)
