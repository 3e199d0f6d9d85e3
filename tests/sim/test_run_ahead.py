"""Prompts computed ahead of their reservation: a decode node with one row keeps all but one request waiting."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from prefill_node.scheduler import PrefillScheduler
from shared.config import NodeConfig
from shared.engine.vitals import Vitals
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.req import Req
from shared.timeline import ReqStage
from tests.cluster import Cluster, MakeEngine, small_config
from tests.later_work import assert_kept, later_work
from tests.sim.test_races import params, prompt
from tests.token_engine import TokenStream, reference_tokens, token_engine

PAGE_SIZE, CHUNK = 4, 16


def config(
    *, share: float = 0.5, overlap: bool = True, keep: bool = True, priorities: bool = False
) -> NodeConfig:
    return small_config(
        tokens=400,
        keeps_prefixes=keep,
        overlap=overlap,
        context_length=300,
        prefill_ahead_share=share,
        enable_priority_scheduling=priorities,
    )


class Full:
    """1P1D; the only row of the decode node is taken until `free`. Records what the prefill node computes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.router = cluster, cluster.router
        scheduler = cluster.nodes["p0"].scheduler
        assert isinstance(scheduler, PrefillScheduler)
        self.prefill = scheduler
        self.computed: list[tuple[str, int, int]] = []
        """The request, first token and end of each part of a prompt that was launched."""
        self._blocker = self.submit("blocker", 5, num_new=200)
        self.run(30)
        assert self.router.answers[self._blocker].token_ids
        self.computed.clear()

    def submit(
        self,
        rid: str,
        length: int,
        *,
        num_new: int = 4,
        decode: str | None = "d0",
        priority: int = 0,
        evicts_first: str | None = None,
    ) -> ReqKey:
        ids, wanted = prompt(length, seed=length), params(num_new)
        return self.router.submit(
            rid, ids, wanted, "p0", decode, priority=priority, evicts_first=evicts_first
        )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        forwards = self.num_forwards
        self.cluster.step(check=True)
        last = self.prefill.batcher.last_batch
        if self.num_forwards > forwards and last is not None:
            self.computed += [(i.req.key.rid, i.start, i.start + i.length) for i in last.extends]

    @property
    def vitals(self) -> Vitals:
        return self.cluster.nodes["p0"].vitals

    @property
    def num_forwards(self) -> int:
        stream = self.cluster.nodes["p0"].engine.stream
        assert isinstance(stream, TokenStream)
        return stream.num_forwards + len(stream.queue)

    def free(self) -> None:
        """The decode node has room again. Runs until every request has ended."""
        self.cluster.router.give_up(self._blocker, "to make room")
        while not all(answer.ended for answer in self.router.answers.values()):
            self.step()
        self.cluster.run_all(check=True)
        self.cluster.assert_idle()
        assert self.prefill.run_ahead.num_pages == 0

    def assert_right(self, key: ReqKey, length: int, num_new: int = 4) -> None:
        assert self.cluster.tokens(key) == reference_tokens(prompt(length, seed=length), num_new)


@contextmanager
def full(make: MakeEngine = token_engine, **options: bool | float) -> Iterator[Full]:
    own = config(**options)  # type: ignore[arg-type]
    one_row = replace(own, schedule=replace(own.schedule, max_running_requests=1))
    with Cluster(1, 1, make, own, decode_config=one_row) as cluster:
        yield Full(cluster)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_only_the_last_part_is_computed_after_the_reservation(overlap: bool) -> None:
    with full(overlap=overlap) as fleet:
        key = fleet.submit("a", 42)
        fleet.run(20)
        assert not fleet.computed, "the decode node may still answer"
        assert fleet.prefill.queued_tokens.total == 42
        busy_s = fleet.vitals.prefill_busy_s
        fleet.run(80)
        assert fleet.computed == [("a", 0, 16), ("a", 16, 32), ("a", 32, 40)]
        assert fleet.prefill.run_ahead.num_pages == 10
        assert fleet.prefill.queued_tokens.total == 2
        req = fleet.prefill.reqs[key]
        assert req.timeline.stage is ReqStage.QUEUED and req.kv is None
        computed_s = fleet.vitals.prefill_busy_s - busy_s
        assert req.ahead_s == pytest.approx(computed_s) and (computed_s > 0) is overlap, "of all chunks"
        count = fleet.cluster.nodes["p0"].engine.ledger.count()
        assert count.held == count.protected == 0
        fleet.free()
        assert fleet.computed[3:] == [("a", 40, 42)]
        fleet.assert_right(key, 42)
        assert (fleet.vitals.num_ahead_tokens, fleet.vitals.num_ahead_evicted_tokens) == (40, 0)


def test_a_chunk_has_every_field_of_the_work() -> None:
    """But for its ids, and for what it wants: nothing. So a field that a later release adds is there, too."""
    with full() as fleet:
        key = fleet.submit("a", 42)
        fleet.run(10)
        work = later_work(tuple(prompt(42, seed=42)), params(4))
        fleet.prefill.reqs[key].work = work
        while not fleet.computed:
            fleet.step()
        last = fleet.prefill.batcher.last_batch
        assert last is not None
        (chunk,) = (item.req for item in last.extends)
        assert chunk is not fleet.prefill.reqs[key]
        nothing = SamplingParams(max_new_tokens=0, temperature=0.0)
        assert_kept(chunk.work, work, input_ids=work.input_ids[:CHUNK], params=nothing)


def test_a_chunk_of_a_request_that_goes_on_ends_within_what_is_known() -> None:
    """Output that is known is prompt to the chunk."""
    with full() as fleet:
        known = tuple(reference_tokens(prompt(30, seed=30), 8, eos=None))
        key = fleet.router.submit("a", prompt(30, seed=30), params(16), "p0", "d0", output_ids=known)
        fleet.run(100)
        assert fleet.computed == [("a", 0, 16), ("a", 16, 32), ("a", 32, 36)]
        fleet.free()
        assert fleet.cluster.tokens(key) == reference_tokens(prompt(30, seed=30), 16)


def test_what_was_computed_ahead_for_a_request_is_not_cached_for_it() -> None:
    with full() as fleet:
        before = fleet.vitals.num_prompt_tokens
        first = fleet.submit("a", 42)
        fleet.run(100)
        second = fleet.submit("b", 42)  # the same prompt
        fleet.run(100)
        fleet.free()
        of_first, of_second = (fleet.router.answers[key].reports[0] for key in (first, second))
        assert of_first.cached_tokens == 0 and of_first.ahead_s > 0
        assert of_second.cached_tokens == 40 and of_second.ahead_s == 0
        assert fleet.vitals.num_prompt_tokens - before == 84
        assert fleet.vitals.num_cached_tokens == 40


def test_what_was_computed_ahead_is_evicted_first_where_the_decode_node_keeps_it() -> None:
    with full() as fleet:
        fleet.submit("older", 40, num_new=1, decode=None)
        fleet.submit("a", 42, evicts_first="p0")
        fleet.run(100)
        assert fleet.prefill.run_ahead.num_pages == 10
        fleet.free()
        ledger = fleet.cluster.nodes["p0"].engine.ledger
        ledger.allocator.free(ledger.radix_cache.evict(10))
        older, ahead = (ledger.radix_cache.peek(prompt(n, seed=n), n).num_pages for n in (40, 42))
        assert (older, ahead) == (10, 0)


@pytest.mark.parametrize("options", [{"share": 0.0}, {"keep": False}], ids=["share 0", "no RadixCache"])
def test_nothing_is_computed_ahead(options: dict[str, float]) -> None:
    with full(**options) as fleet:
        key = fleet.submit("a", 42)
        fleet.run(100)
        assert not fleet.computed
        fleet.free()
        fleet.assert_right(key, 42)


def test_a_prompt_whose_logprobs_are_wanted_is_not_computed_ahead() -> None:
    """Its positions have to be computed when they can be told: only what comes before them is."""
    with full() as fleet:
        ids = prompt(42, seed=42)
        for rid, start_len in (("all", 0), ("some", 20), ("outputs", -1)):
            wanted = SamplingParams(
                max_new_tokens=4, temperature=0.0, logprobs=LogprobParams(start_len=start_len)
            )
            fleet.router.submit(rid, [*ids, start_len + 1], wanted, "p0", "d0")
        fleet.run(100)
        assert fleet.computed == [("some", 0, 16), ("some", 16, 20), ("outputs", 20, 36), ("outputs", 36, 40)]


def test_the_share_bounds_what_is_computed_ahead() -> None:
    """10 of 100 pages, in order of arrival. When the first request has its reservation, its pages count no more."""
    with full(share=0.1) as fleet:
        keys = [fleet.submit(f"{length}", length) for length in (30, 31, 32)]
        for _ in range(100):
            fleet.step()
            assert fleet.prefill.run_ahead.num_pages <= 10
        assert fleet.computed == [("30", 0, 16), ("30", 16, 28), ("31", 0, 12)]
        fleet.free()
        assert fleet.computed[3:5] == [("30", 28, 30), ("31", 12, 28)], "each in its turn"
        for key, length in zip(keys, (30, 31, 32), strict=True):
            fleet.assert_right(key, length)


def test_what_was_computed_ahead_of_others_is_not_evicted() -> None:
    """Half of the pool is read by a loan, say. The second prompt gets the rest of it and is computed no further."""
    with full(share=1.0) as fleet:
        ledger = fleet.cluster.nodes["p0"].engine.ledger
        alone = fleet.submit("alone", 200, num_new=1, decode=None)
        while not fleet.router.answers[alone].ended:
            fleet.step()
        lock = ledger.radix_cache.lock(ledger.radix_cache.match_prefix(prompt(200, seed=200)).node)
        fleet.computed.clear()
        keys = [fleet.submit(f"{length}", length) for length in (160, 161)]
        fleet.run(100)
        assert (
            sum(end - start for _, start, end in fleet.computed)
            == PAGE_SIZE * fleet.prefill.run_ahead.num_pages
        )
        assert fleet.prefill.run_ahead.num_pages == ledger.num_available_pages
        lock.release()
        fleet.free()
        for key, length in zip(keys, (160, 161), strict=True):
            fleet.assert_right(key, length)


def test_a_chunk_waits_for_a_row() -> None:
    """Transfers may have taken every one. A chunk without a row would wait before requests that come later."""
    with full() as fleet:
        ledger = fleet.cluster.nodes["p0"].engine.ledger
        empty = ledger.radix_cache.match_prefix(())
        taken = [ledger.admit(empty, "") for _ in range(ledger.rows.num_free)]
        fleet.submit("a", 42)
        fleet.run(80)
        assert not fleet.computed and not fleet.prefill.batcher.num_waiting
        for kv in taken:
            assert kv is not None
            ledger.cache_finished_req(kv, ())
        fleet.run(40)
        assert fleet.computed[0] == ("a", 0, 16)


def test_a_chunk_has_room_beside_the_window_that_it_goes_on_behind() -> None:
    """Other requests leave five window pages, of which the next tokens see up to three."""
    with full(partial(token_engine, window=9, window_tokens=160)) as fleet:
        ledger = fleet.cluster.nodes["p0"].engine.ledger
        taken = ledger.admit(ledger.radix_cache.match_prefix(()), "")
        assert taken is not None
        assert ledger.grow(taken, PAGE_SIZE * (ledger.available.window_pages - 5))
        key = fleet.submit("a", 42)
        fleet.run(100)
        assert fleet.computed == [("a", 0, 16), ("a", 16, 28), ("a", 28, 40)]
        ledger.cache_finished_req(taken, ())
        fleet.free()
        fleet.assert_right(key, 42)


def test_a_request_that_ended_is_not_kept() -> None:
    """Its prompt was looked up, and the RadixCache may not change for long after."""
    with full() as fleet:
        key = fleet.submit("not kept", 42)
        fleet.run(100)
        fleet.router.give_up(key, "cancelled")
        fleet.run(5)
        assert key not in fleet.prefill.reqs
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is Req and one.key == key]


def test_priorities_lead_the_order() -> None:
    with full(priorities=True) as fleet:
        for rid, length, priority in (("low", 18, 0), ("high", 19, 5)):
            fleet.submit(rid, length, priority=priority)
        fleet.run(100)
        assert fleet.computed == [("high", 0, 16), ("low", 0, 16)]


def test_a_request_that_has_its_reservation_waits_for_one_chunk_at_most() -> None:
    with full() as fleet:
        fleet.submit("a", 200)
        while not fleet.computed:
            fleet.step()
        alone = fleet.submit("b", 30, decode=None)
        fleet.run(40)
        before_b = fleet.computed[: fleet.computed.index(("b", 0, 16))]
        assert len(before_b) <= 2, (
            "one was in flight when it came, or was launched while its message travelled"
        )
        assert [part[0] for part in fleet.computed[len(before_b) :][:3]] == ["b", "b", "a"]
        assert len(fleet.router.answers[alone].token_ids) == 1


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_cancelled_in_the_midst(overlap: bool) -> None:
    with full(overlap=overlap) as fleet:
        key, other = fleet.submit("a", 60), fleet.submit("b", 33)
        while not fleet.computed:
            fleet.step()
        fleet.router.give_up(key, "cancelled")
        fleet.run(60)
        assert key not in fleet.prefill.reqs
        assert ("b", 16, 32) in fleet.computed and ("a", 32, 48) not in fleet.computed
        assert fleet.prefill.run_ahead.num_pages == 8
        fleet.free()
        fleet.assert_right(other, 33)


def test_a_reserved_request_evicts_what_was_computed_ahead() -> None:
    """It finds every page of the pool. What was evicted is computed again, and the tokens are the same."""
    with full() as fleet:
        keys = [fleet.submit(f"{length}", length) for length in (80, 81)]
        fleet.run(100)
        assert fleet.prefill.run_ahead.num_pages == 19 + 20
        large = fleet.submit("large", 290, num_new=1, decode=None)
        fleet.run(30)
        assert fleet.router.answers[large].ended
        assert fleet.prefill.run_ahead.num_pages < 39
        fleet.free()
        load = fleet.vitals.load()
        assert 0 < load.num_ahead_evicted_tokens == load.num_ahead_tokens - PAGE_SIZE * 39
        for key, length in zip(keys, (80, 81), strict=True):
            fleet.assert_right(key, length)


def test_a_chunk_that_fails_fails_its_request() -> None:
    with full() as fleet:
        key, other = fleet.submit("a", 42), fleet.submit("b", 33)
        fleet.run(20)
        stream = fleet.cluster.nodes["p0"].engine.stream
        assert isinstance(stream, TokenStream)
        stream.fail_next = True
        fleet.run(80)
        (failed,) = fleet.router.answers[key].failures
        assert (failed.status, failed.message) == (500, "the forward of this request failed")
        fleet.free()
        fleet.assert_right(other, 33)


def test_a_node_that_drains_hands_back_what_it_computed_ahead_for() -> None:
    with full() as fleet:
        key = fleet.submit("a", 60)
        while not fleet.computed:
            fleet.step()
        fleet.cluster.nodes["p0"].router_port.drain(10.0)
        fleet.run(5)
        assert fleet.router.answers[key].failures
        assert key not in fleet.prefill.reqs


def test_closed_in_the_midst() -> None:
    with full() as fleet:
        fleet.submit("a", 60)
        while not fleet.computed:
            fleet.step()
        engine = fleet.cluster.nodes["p0"].engine
        fleet.prefill.close("the test is over")
        count = engine.ledger.count()
        assert count.held == count.protected == 0 and not engine.ledger.live
        fleet.cluster.nodes["p0"].alive = False
        engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_lives(seed: int) -> None:
    """Few pages, few rows, shared beginnings, cancelled requests: right tokens, and every page comes home."""
    rng = random.Random(seed)
    own = config(share=rng.choice([0.1, 0.5, 1.0]), overlap=rng.random() < 0.5)
    small = replace(own, cache=replace(own.cache, max_total_tokens=200))
    two_rows = replace(own, schedule=replace(own.schedule, max_running_requests=2))
    beginnings = [prompt(40, seed=n) for n in range(3)]
    make = partial(token_engine, window=9 if seed % 2 else None, window_tokens=140)
    with Cluster(1, 1, make, small, decode_config=two_rows) as cluster:
        wanted: dict[ReqKey, list[int]] = {}
        ahead = 0
        for n in range(40):
            ids = [
                *rng.choice(beginnings)[: rng.randrange(40)],
                *(rng.randrange(8, 900) for _ in range(rng.randrange(1, 60))),
            ]
            decode = None if rng.random() < 0.2 else "d0"
            num_new = 1 if decode is None else rng.randrange(10, 60)
            key = cluster.router.submit(f"{n}", ids, params(num_new), "p0", decode)
            wanted[key] = reference_tokens(ids, num_new)
            for _ in range(rng.randrange(20)):
                cluster.step(rng.choice([0.002, 0.02]), check=True)
                scheduler = cluster.nodes["p0"].scheduler
                assert isinstance(scheduler, PrefillScheduler)
                ahead = max(ahead, scheduler.run_ahead.num_pages)
            if rng.random() < 0.2:
                gone = rng.choice(list(wanted))
                cluster.router.give_up(gone, "cancelled")
        cluster.run_all(check=True)
        for key, tokens in wanted.items():
            if not cluster.router.answers[key].failures:
                assert cluster.tokens(key) == tokens
        cluster.assert_idle()
        assert ahead, "nothing was computed ahead"
