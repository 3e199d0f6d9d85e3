"""Races by construction: who sends what before whom, on a controlled clock, over the fake transport."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from shared.config import TransferOptions
from shared.protocol.messages import Decode, Finish, Leaving, Prefill, ReqKey, Struct
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.transfer_messages import CancelTransfer, Done, Grant, Handoff, LeaseRenew, Offer, Ready
from tests.cluster import Cluster, small_config
from tests.fake_network import Faults
from tests.token_engine import EOS, reference_tokens, token_engine

config = partial(small_config, tokens=400, context_length=200)


def params(n: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, temperature=0.0)


def prompt(length: int, seed: int = 1) -> list[int]:
    """A prompt whose first 16 output tokens are not EOS."""
    rng = random.Random(seed)
    while True:
        ids = [rng.randrange(8, 900) for _ in range(length)]
        if len(reference_tokens(ids, 16)) == 16:
            return ids


ORDERS: list[Sequence[type[Struct]]] = [
    order
    for order in itertools.permutations([Prefill, Decode, Ready, Offer, Handoff, Grant])
    if order.index(Offer)
    < order.index(Handoff)  # of one sender to one receiver: the transport keeps their order
]


@pytest.mark.parametrize("order", ORDERS[::7], ids=lambda order: "-".join(t.__name__ for t in order))
def test_messages_of_three_parties_in_every_order(order: Sequence[type[Struct]]) -> None:
    """Each message type is held back, then let go in `order`; the answer and the pages are the same."""
    with Cluster(1, 1, token_engine, config()) as cluster:
        for kind in order:
            cluster.network.hold(kind)
        ids = prompt(30)
        key = cluster.router.submit("a", ids, params(8), "p0", "d0")
        for kind in order:
            for _ in range(10):
                cluster.step(0.01)
            cluster.network.release(kind)
        cluster.run_all(check=True)
        assert cluster.tokens(key) == reference_tokens(ids, 8)
        cluster.assert_idle()


def test_a_router_that_leaves_ends_what_it_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and no node waits until it counts as silent, or warns of that."""
    with Cluster(1, 1, token_engine, config()) as cluster:
        key = cluster.router.submit("a", prompt(30), params(100), "p0", "d0")
        cluster.run(lambda: bool(cluster.router.answers[key].token_ids))
        for name in ("p0", "d0"):
            cluster.router.outbox.send(name, Leaving("the router is shutting down"))
        cluster.run(lambda: not any(node.scheduler.reqs for node in cluster.live), max_steps=50)
        cluster.assert_idle()
        assert not caplog.records


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_idle_loop_makes_progress(name: str) -> None:
    """A router takes a node without progress for hung, whether it has requests or not."""
    with Cluster(1, 1, token_engine, config()) as cluster:
        seen = []
        for _ in range(5):
            cluster.assert_idle()
            cluster.step()
            seen.append(cluster.router.loads[name].progress)
        assert seen == sorted(set(seen))


def test_retraction_while_a_transfer_wants_the_pages() -> None:
    """Running requests outgrow the pool while reservations hold pages and transfers are stuck on the way."""
    with Cluster(1, 1, token_engine, config(tokens=96, slots=6)) as cluster:
        wanted = {}
        for i in range(3):
            ids = prompt(20, seed=i)
            wanted[cluster.router.submit(f"r{i}", ids, params(40), "p0", "d0")] = reference_tokens(ids, 40)
        cluster.run(lambda: len(cluster.nodes["d0"].scheduler.batcher.running_batch) >= 2)
        cluster.network.hold(Offer)
        cluster.network.hold(Handoff)
        for i in range(3, 7):
            ids = prompt(16, seed=i)
            wanted[cluster.router.submit(f"r{i}", ids, params(20), "p0", "d0")] = reference_tokens(ids, 20)
        for _ in range(60):
            cluster.step()
        cluster.network.release(Offer)
        cluster.network.release(Handoff)
        cluster.run_all(check=True)
        assert cluster.nodes["d0"].scheduler.batcher.num_retractions > 0
        for key, tokens in wanted.items():
            assert cluster.tokens(key) == tokens
        cluster.assert_idle()


def test_two_requests_compute_the_same_prefix_at_once() -> None:
    """Both are admitted before either is cached; the duplicate pages stay held until their offers have ended."""
    with Cluster(
        1, 1, token_engine, config(chunk=64, in_batch_prefix_caching_deprioritize_threshold=64)
    ) as cluster:
        cluster.network.hold(Done)
        ids = prompt(40)
        keys = [cluster.router.submit(f"r{i}", [*ids, 100 + i], params(6), "p0", "d0") for i in range(3)]
        cluster.run(lambda: all(answer.token_ids for answer in cluster.router.answers.values()), check=True)
        ledger = cluster.nodes["p0"].engine.ledger
        superseded = [kv.superseded for kv in ledger.live.values()]
        assert sum(map(bool, superseded)) == 2, "two of three computed what the third had shared"
        cluster.network.release(Done)
        cluster.run_all(check=True)
        for i, key in enumerate(keys):
            assert cluster.tokens(key) == reference_tokens([*ids, 100 + i], 6)
        cluster.assert_idle()


@pytest.mark.parametrize("held", [Handoff, Grant, Offer, Ready, Done, None], ids=str)
def test_cancel_against_every_stage(held: type[Struct] | None) -> None:
    """The router cancels while a message is on its way; it then arrives for a request that is gone."""
    with Cluster(1, 1, token_engine, config()) as cluster:
        if held is not None:
            cluster.network.hold(held)
        key = cluster.router.submit("a", prompt(30), params(12), "p0", "d0")
        for _ in range(25):
            cluster.step()
        cluster.router.cancel(key)
        for _ in range(5):
            cluster.step()
        if held is not None:
            cluster.network.release(held)
        cluster.run(lambda: not any(node.scheduler.reqs for node in cluster.live))
        cluster.assert_idle()
        ids = prompt(33, seed=9)
        again = cluster.router.submit("b", ids, params(5), "p0", "d0")
        cluster.router.answers.pop(key)
        cluster.run_all(check=True)
        assert cluster.tokens(again) == reference_tokens(ids, 5)


def test_a_lost_ready_ends_in_an_error_and_leaks_nothing() -> None:
    options = TransferOptions(ready_timeout_s=2.0, transfer_timeout_s=3.0, offer_timeout_s=4.0)
    with Cluster(1, 1, token_engine, config(), options=options) as cluster:
        cluster.network.drop_next(Ready)
        key = cluster.router.submit("a", prompt(30), params(12), "p0", "d0")
        cluster.run(lambda: cluster.router.answers[key].ended, max_steps=5000)
        failure = cluster.router.answers[key].failures[0]
        assert (failure.status, failure.blames) == (503, "d0"), "p0 waits for d0"
        cluster.run_all()
        cluster.assert_idle()


@pytest.mark.parametrize("dropped", [Offer, Handoff, Grant, Done, CancelTransfer], ids=lambda t: t.__name__)
def test_a_lost_message_ends_every_request_and_leaks_nothing(dropped: type[Struct]) -> None:
    options = TransferOptions(
        ready_timeout_s=2.0, transfer_timeout_s=2.0, offer_timeout_s=3.0, lease_s=2.0, park_s=1.0
    )
    with Cluster(1, 1, token_engine, config(), options=options) as cluster:
        cluster.network.drop_next(dropped)
        ids = prompt(30)
        key = cluster.router.submit("a", ids, params(12), "p0", "d0")
        if dropped is CancelTransfer:
            cluster.run(lambda: bool(cluster.router.answers[key].token_ids))
            cluster.router.cancel(key)
            cluster.router.answers.pop(key)
        for _ in range(1500):
            cluster.step(0.01)
        cluster.run_all()
        cluster.assert_idle()
        again = cluster.router.submit("b", ids, params(5), "p0", "d0")
        cluster.run(lambda: cluster.router.answers[again].ended)
        assert cluster.tokens(again) == reference_tokens(ids, 5)


@pytest.mark.parametrize("num_whole", [0, 3])
def test_corrupt_payload_fails_the_transfer_not_the_answer(num_whole: int) -> None:
    """A byte that flips on the wire is found by the digest: an error, never a wrong token, and nothing is cached."""
    options = TransferOptions(slot_nbytes=2 * 2 * config().cache.page_size * 8)  # two pages
    with Cluster(1, 1, token_engine, config(), options=options) as cluster:
        cluster.network.corrupt_payloads(after=num_whole)
        key = cluster.router.submit("a", prompt(30), params(12), "p0", "d0")
        cluster.run(lambda: cluster.router.answers[key].ended)
        cluster.run_all()
        (failure,) = cluster.router.answers[key].failures
        assert (failure.status, failure.blames) == (500, "p0")
        cluster.assert_idle()
        assert cluster.nodes["p0"].engine.ledger.radix_cache.pages() == [], (
            "a retry would be given these pages"
        )
        assert cluster.nodes["d0"].engine.ledger.radix_cache.pages() == []
        ids = prompt(30, seed=4)
        again = cluster.router.submit("b", ids, params(5), "p0", "d0")
        cluster.run(lambda: cluster.router.answers[again].ended)
        assert cluster.tokens(again) == reference_tokens(ids, 5)


@pytest.mark.parametrize("change", [{"digest": 1}, {"token_ids": (7,)}], ids=["digest", "tokens"])
def test_a_handoff_that_its_digest_does_not_fit_is_an_error(change: dict[str, int]) -> None:
    """The first token reaches the router from the prefill node; the decode node goes on with no other."""
    with Cluster(1, 1, token_engine, config()) as cluster:
        cluster.network.hold(Handoff)
        ids = prompt(30)
        key = cluster.router.submit("a", ids, params(12), "p0", "d0")
        cluster.run(lambda: cluster.network.num_held(Handoff) == 1)
        handoff = cluster.network.take_held(Handoff)
        cluster.nodes["d0"].side.on_message("p0", msgspec.structs.replace(handoff, **change))  # type: ignore[arg-type]
        cluster.run(lambda: cluster.router.answers[key].ended)
        (failure,) = cluster.router.answers[key].failures
        assert (failure.status, "digest" in failure.message) == (500, True)
        cluster.run_all()
        cluster.assert_idle()
        cluster.network.release(Handoff)
        again = cluster.router.submit("b", ids, params(5), "p0", "d0")
        cluster.run_all()
        assert cluster.tokens(again) == reference_tokens(ids, 5)
        cluster.assert_idle()


@pytest.mark.parametrize("seed", range(8))
def test_random_work_with_faults_and_deaths(seed: int) -> None:
    """Nodes die at any step, messages are lost: every request ends, right or with an error, and no page leaks."""
    rng = random.Random(seed)
    faults = Faults(
        delay_s=(0.0001, rng.choice([0.002, 0.02])),
        silent_kill=rng.random() < 0.3,
    )
    lossy = rng.choice([0.0, 0.0, 0.01])
    options = TransferOptions(
        ready_timeout_s=3.0,
        transfer_timeout_s=3.0,
        offer_timeout_s=4.0,
        lease_s=3.0,
        park_s=2.0,
        peer_timeout_s=2.0,
        connect_timeout_s=2.0,
    )
    cfg = config(
        tokens=rng.choice([120, 240]),
        page_size=rng.choice([1, 4, 16]),
        chunk=rng.choice([7, 32]),
        retract_every=rng.choice([0, 4]),
        retract_policy=rng.choice(["auto", "host", "recompute"]),
        host_tokens=rng.choice([16, 64, 512]),
        overlap=rng.random() < 0.7,
    )
    with Cluster(2, 2, token_engine, cfg, seed=seed, faults=faults, options=options) as cluster:
        wanted: dict[ReqKey, list[int]] = {}
        homes: dict[ReqKey, tuple[str, str]] = {}
        for step in range(900):
            if step < 500 and rng.random() < 0.08:
                ids, n = prompt(rng.randint(3, 50), seed=rng.randrange(10**6)), rng.randint(2, 30)
                p, d = f"p{rng.randrange(2)}", f"d{rng.randrange(2)}"
                if cluster.nodes[p].alive and cluster.nodes[d].alive:
                    key = cluster.router.submit(
                        f"r{step}", ids, params(n), p, d, evicts_first=rng.choice([p, d])
                    )
                    wanted[key], homes[key] = reference_tokens(ids, n), (p, d)
            if rng.random() < lossy:
                cluster.network.drop_next(rng.choice([Ready, Offer, Grant, Handoff, Done, CancelTransfer]))
            if step in (150, 300) and seed % 3:
                victim = rng.choice(sorted(n.name for n in cluster.live))
                cluster.kill(victim)
                for key, (p, d) in homes.items():  # what the real router does when a connection closes
                    if victim in (p, d) and not cluster.router.answers[key].ended:
                        cluster.router.cancel(key)
                        cluster.router.answers[key].finish = Finish("abort")
                if rng.random() < 0.7:
                    cluster.start(victim, cluster.nodes[victim].role)
            cluster.step(0.002, check=step % 20 == 0)
        for _ in range(1500):
            cluster.step(0.01, check=False)
        cluster.run_all()
        finished = 0
        for key, tokens in wanted.items():
            answer = cluster.router.answers[key]
            if answer.finish in (Finish("length"), Finish("stop", EOS)):
                assert answer.token_ids == tokens, key
                finished += 1
            else:
                assert answer.token_ids == tokens[: len(answer.token_ids)], key
        assert finished > len(wanted) // 4
        cluster.assert_idle()


def test_a_lease_that_ends_after_the_handoff_is_reported() -> None:
    """The prefill node has said all it had to say; the decode node tells the router that it waits in vain."""
    options = TransferOptions(lease_s=1.0, transfer_timeout_s=300.0)
    with Cluster(1, 1, token_engine, config(), options=options) as cluster:
        cluster.network.hold(Grant)
        cluster.network.hold(LeaseRenew)
        key = cluster.router.submit("a", prompt(30), params(12), "p0", "d0")
        cluster.run(lambda: cluster.router.answers[key].ended, max_steps=3000)
        failure = cluster.router.answers[key].failures[0]
        assert (failure.status, failure.blames) == (503, "p0"), "d0 waits for p0"
        cluster.network.release(Grant)
        cluster.network.release(LeaseRenew)
        cluster.run_all()
        cluster.assert_idle()


def test_a_decode_node_keeps_no_copies_of_a_shared_prompt() -> None:
    with Cluster(1, 1, token_engine, config(chunk=64)) as cluster:
        ids = prompt(40)
        for i in range(3):
            cluster.router.submit(f"r{i}", [*ids, 100 + i], params(9), "p0", "d0")
        cluster.run(lambda: len(cluster.nodes["d0"].scheduler.batcher.running_batch) == 3)
        ledger = cluster.nodes["d0"].engine.ledger
        assert not any(kv.superseded for kv in ledger.live.values())
        assert ledger.count().protected == 10, "ten pages of four tokens, once for all three"
        cluster.run_all(check=True)
        cluster.assert_idle()
