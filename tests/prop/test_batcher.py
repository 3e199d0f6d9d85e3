"""The Batcher over the real ledger, driven at random: every output right, every page home, nobody starves."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.engine.launcher import MAX_FAILED_IN_A_ROW, Launched, Launcher
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kvcache.audit import audit, audit_idle
from shared.protocol.messages import Finish, ReqKey, Role
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.token_engine import TokenResult, reference_tokens, token_engine


def make_req(rid: str, ids: list[int], max_new_tokens: int, role: Role = Role.DECODE) -> Req:
    return Req(
        key=ReqKey("router", rid),
        ids=list(ids),
        num_input_ids=len(ids),
        params=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0),
        timeline=Timeline(role),
        max_output_len=max_new_tokens if role is Role.DECODE else 1,
    )


class Driver:
    """Plan, launch, commit at depth 0 or 1, with the checks of every step."""

    def __init__(self, config: NodeConfig, overlap: bool) -> None:
        self.engine = token_engine(config)
        self.batcher = Batcher(self.engine.ledger, config.schedule)
        self.launcher = Launcher(self.engine.stream, self.engine.ledger, self.engine.eos_token_ids)
        self.overlap = overlap
        self.in_flight: Launched | None = None
        self.live: dict[str, Req] = {}
        self.done: dict[str, Req] = {}

    def add(self, req: Req) -> None:
        self.live[req.key.rid] = req
        self.batcher.add(req)

    def end(self, req: Req) -> None:
        self.batcher.remove(req)
        if req.finish is None:
            req.end(Finish("abort"))
        if req.kv is not None:
            self.engine.ledger.cache_finished_req(req.kv, req.ids)
            req.kv = None
        self.done[req.key.rid] = self.live.pop(req.key.rid)

    def step(self) -> bool:
        batch = self.batcher.get_next_batch()
        self.check_places()
        launched = self.launcher.launch(batch)
        done, self.in_flight = (self.in_flight, launched) if self.overlap else (launched, None)
        committed, failed = self.launcher.commit(done)
        assert not failed
        for req in committed.finished:
            self.end(req)
        audit(self.engine.ledger)
        return launched is not None or done is not None

    def check_places(self) -> None:
        """Every live request is in exactly one place, and holds KV exactly where it should."""
        b = self.batcher
        in_last = [i.req for i in b.last_batch.items] if b.last_batch and b.last_batch.is_extend else []
        places = {
            "waiting": b.waiting_queue,
            "chunked": [b.chunked_req] if b.chunked_req else [],
            "last": [req for req in in_last if req is not b.chunked_req and req.finish is None],
            "running": b.running_batch,
        }
        seen = [id(req) for reqs in places.values() for req in reqs]
        assert len(seen) == len(set(seen)), "a request is in two places"
        # A request whose last token is in flight has left the batches and waits for its commit.
        awaited = {id(r) for r in self.live.values() if not r.wants_decode}
        assert {id(r) for r in self.live.values()} - awaited <= set(seen), "a request is nowhere"
        for req in places["waiting"]:
            assert req.kv is None
        for name in ("chunked", "last", "running"):
            for req in places[name]:
                assert req.kv is not None


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_output_is_right_and_every_page_comes_home(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    schedule = ScheduleOptions(
        chunked_prefill_size=rng.choice([3, 7, 16, 100]),
        max_prefill_tokens=rng.choice([5, 40, 1000]),
        max_running_requests=rng.choice([2, 5, 12]),
        retract_every=rng.choice([0, 0, 2, 5]),
        schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
    )
    cache = CacheOptions(
        page_size=page_size,
        max_total_tokens=rng.choice([64, 96, 240]),
        disable_radix_cache=rng.random() < 0.2,
    )
    driver = Driver(
        NodeConfig(cache=cache, schedule=schedule, model=ModelOptions(context_length=256)), rng.random() < 0.6
    )
    shared = [rng.randrange(997) for _ in range(20)]
    wanted = {}
    for i in range(14):
        ids = shared[: rng.randrange(20)] + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        wanted[f"r{i:02d}"] = (ids, rng.randint(1, min(24, 64 - len(ids))))
    pending, aborted, steps = list(wanted), set(), 0
    while pending or driver.live:
        if pending and rng.random() < 0.5:
            rid = pending.pop()
            driver.add(make_req(rid, *wanted[rid]))
        if driver.live and rng.random() < 0.02:
            victim = driver.live[rng.choice(sorted(driver.live))]
            aborted.add(victim.key.rid)
            driver.end(victim)
        driver.step()
        steps += 1
        assert steps < 4000, "somebody starves"
    while driver.step():
        pass
    for rid, (ids, max_new_tokens) in wanted.items():
        outputs = driver.done[rid].ids[len(ids) :]
        expected = reference_tokens(ids, max_new_tokens)
        assert outputs == (expected[: len(outputs)] if rid in aborted else expected), rid
    audit_idle(driver.engine.ledger)


def test_prefill_role_samples_one_token_and_never_decodes() -> None:
    options = ScheduleOptions(chunked_prefill_size=8, max_running_requests=4)
    driver = Driver(NodeConfig(cache=CacheOptions(max_total_tokens=320), schedule=options), overlap=True)
    req = make_req("p", list(range(30)), 9, Role.PREFILL)
    driver.add(req)
    while driver.step():
        assert not driver.batcher.running_batch
    assert req.ids[30:] == reference_tokens(range(30), 1)
    assert req.finish is None


@pytest.mark.parametrize("overlap", [False, True])
def test_eos_under_overlap_drops_the_step_launched_too_early(overlap: bool) -> None:
    ids = next([i, 5, 3] for i in range(5000) if len(reference_tokens([i, 5, 3], 40)) in range(3, 20))
    driver = Driver(NodeConfig(cache=CacheOptions(max_total_tokens=320)), overlap)
    driver.add(make_req("e", ids, 40))
    while driver.step():
        pass
    expected = reference_tokens(ids, 40)
    assert driver.done["e"].ids[3:] == expected
    assert driver.done["e"].finish == Finish("stop", 7)
    # one prefill, one forward for each further token, and under overlap one forward too many
    assert driver.engine.stream.num_forwards == len(expected) + overlap


def test_a_forward_that_raises_fails_its_own_requests_only() -> None:
    driver = Driver(NodeConfig(cache=CacheOptions(max_total_tokens=320)), overlap=False)
    driver.add(make_req("a", [1, 2, 3], 5))
    driver.engine.stream.fail_next = True
    launched = driver.launcher.launch(driver.batcher.get_next_batch())
    committed, failed = driver.launcher.commit(launched)
    assert [req.key.rid for req in failed] == ["a"] and not committed.sampled
    driver.end(failed[0])
    assert driver.engine.ledger.allocator.num_free_for_arrivals == driver.engine.ledger.allocator.num_pages
    driver.add(make_req("b", [4, 5, 6], 5))
    while driver.step():
        pass
    assert driver.done["b"].ids[3:] == reference_tokens([4, 5, 6], 5)
    audit_idle(driver.engine.ledger)


class RefusingStream:
    """A stream whose `submit` raises, as a CUDA forward does when it runs out of memory."""

    def submit(self, batch: ModelWorkerBatch) -> TokenResult:
        raise RuntimeError("cannot launch")

    def close(self) -> None:
        return


def test_a_forward_that_cannot_be_launched_fails_its_requests_only() -> None:
    driver = Driver(NodeConfig(cache=CacheOptions(max_total_tokens=320)), overlap=False)
    driver.add(make_req("a", [1, 2, 3], 5))
    refusing = Launcher(RefusingStream(), driver.engine.ledger, driver.engine.eos_token_ids)
    committed, failed = refusing.commit(refusing.launch(driver.batcher.get_next_batch()))
    assert [req.key.rid for req in failed] == ["a"] and not committed.sampled
    driver.end(failed[0])
    audit_idle(driver.engine.ledger)


def test_a_device_that_is_broken_ends_the_node() -> None:
    driver = Driver(NodeConfig(cache=CacheOptions(max_total_tokens=320)), overlap=False)
    refusing = Launcher(RefusingStream(), driver.engine.ledger, driver.engine.eos_token_ids)
    for i in range(MAX_FAILED_IN_A_ROW - 1):
        driver.add(make_req(f"r{i}", [1, 2, 3], 5))
        _, failed = refusing.commit(refusing.launch(driver.batcher.get_next_batch()))
        driver.end(failed[0])
    driver.add(make_req("last", [1, 2, 3], 5))
    with pytest.raises(RuntimeError, match="cannot launch"):
        refusing.commit(refusing.launch(driver.batcher.get_next_batch()))
