"""Under every policy and priority: all outputs right, all pages home, nobody starves, no retraction for nothing."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import POLICIES, choose_victims
from tests.prop.stepping import Stepping, new_req, rids


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_every_output_is_right_and_every_page_comes_home(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    stepping = Stepping(
        num_tokens=rng.choice([64, 96, 240]),
        page_size=rng.choice([1, 2, 4, 16]),
        overlap=rng.random() < 0.6,
        disable_radix_cache=rng.random() < 0.2,
        schedule_policy=policy,
        random_seed=seed,
        chunked_prefill_size=rng.choice([3, 7, 16, 100]),
        enable_mixed_chunk=rng.random() < 0.5,
        max_running_requests=rng.choice([2, 5, 12]),
        retract_every=rng.choice([0, 0, 2, 5]),
        schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
        in_batch_prefix_caching_deprioritize_threshold=rng.choice([1, 4, 32]),
        enable_priority_scheduling=rng.random() < 0.5,
        schedule_low_priority_values_first=rng.random() < 0.5,
        priority_scheduling_preemption_threshold=rng.choice([0, 2]),
        priority_aging_steps=rng.choice([3, 50]),
    )
    prefixes = [[rng.randrange(997) for _ in range(20)] for _ in range(2)]
    pending = []
    for i in range(14):
        shared = rng.choice(prefixes)[: rng.randrange(20)]
        ids = shared + [rng.randrange(997) for _ in range(rng.randint(1, 20))]
        num_new = rng.randint(1, min(24, 64 - len(ids)))
        req = new_req(
            f"r{i:02d}",
            ids,
            num_new,
            ignore_eos=rng.random() < 0.5,
            priority=rng.randint(-4, 4),
            routing_key=rng.choice(["", "a", "b"]),
        )
        pending.append(req)
    while pending:
        if rng.random() < 0.4:
            stepping.add(pending.pop())
        if stepping.live and rng.random() < 0.03:
            stepping.end(stepping.live[rng.choice(sorted(stepping.live))])
        stepping.step()
    stepping.run()
    assert len(stepping.done) == 14


class TestAging:
    """One request at a time runs; `late` is of priority p, and something of priority 5 arrives whenever one ends."""

    NUM_NEW = 3

    def wait_of_the_late(
        self, priority: int, aging_steps: int, num_steps: int, **schedule: object
    ) -> int | None:
        stepping = Stepping(
            max_running_requests=1,
            enable_priority_scheduling=True,
            priority_aging_steps=aging_steps,
            overlap=False,
            **schedule,
        )
        stepping.add(new_req("h0", [1, 2, 3], self.NUM_NEW, priority=5))
        stepping.add(new_req("late", [4, 5, 6], self.NUM_NEW, priority=priority))
        for i in range(1, num_steps):
            if len(stepping.live) < 3:
                stepping.add(new_req(f"h{i}", [7, i % 900, 8], self.NUM_NEW, priority=5))
            stepping.step()
            if "late" in stepping.admitted_at:
                return stepping.admitted_at["late"]
        return None

    @given(priority=st.integers(-5, 5), aging_steps=st.integers(1, 40))
    @settings(max_examples=40)
    def test_nobody_waits_longer_than_the_bound(self, priority: int, aging_steps: int) -> None:
        """(d + 1) * aging_steps forwards, and those who came before that: one that runs and two that wait."""
        bound = (5 - priority + 1) * aging_steps + 3 * self.NUM_NEW + 1
        waited = self.wait_of_the_late(priority, aging_steps, bound + 1)
        assert waited is not None and waited <= bound

    def test_without_aging_it_starves(self) -> None:
        assert self.wait_of_the_late(-5, 0, 1000) is None

    def test_it_does_wait_as_long_as_its_priority_says(self) -> None:
        """Not at once either: a high priority is worth something."""
        waited = self.wait_of_the_late(0, 20, 1000)
        assert waited is not None and waited > 5 * 20

    @pytest.mark.parametrize(("policy", "short_last"), [("lof", True), ("fcfs", False)])
    def test_a_policy_alone_starves_nobody_either(self, policy: str, short_last: bool) -> None:
        """Longest output first, under a steady stream of longer ones."""
        stepping = Stepping(max_running_requests=1, schedule_policy=policy, priority_aging_steps=30)
        stepping.add(new_req("h0", [1, 2, 3], 5), new_req("short", [4, 5, 6], 1))
        while "short" not in stepping.admitted_at:
            if len(stepping.live) < 3:
                stepping.add(new_req(f"h{stepping.num_steps + 1}", [7, 8, 9], 5))
            stepping.step()
            assert stepping.num_steps < 100
        assert (stepping.admitted_at["short"] > 20) is short_last

    def test_who_has_aged_is_not_retracted_for_newcomers(self) -> None:
        """A stream of ever new requests of high priority, each worth a retraction, lets the low one end."""
        stepping = Stepping(
            num_tokens=64,
            max_running_requests=1,
            enable_priority_scheduling=True,
            priority_scheduling_preemption_threshold=2,
            priority_aging_steps=10,
        )
        stepping.add(new_req("low", [1, 2, 3], 40, priority=0))
        while "low" in stepping.live:
            if stepping.num_steps % 4 == 0:
                stepping.add(
                    new_req(f"h{stepping.num_steps}", [5, 6, stepping.num_steps % 900], 2, priority=5)
                )
            stepping.step()
            assert stepping.num_steps < 1000
        assert stepping.done["low"].num_retractions > 0
        stepping.run()


class TestPreemption:
    def full(self, priorities: list[int], **schedule: object) -> Stepping:
        """A pool of 15 pages of 4, full of running requests of 3 pages each; they may grow to 5."""
        options: dict[str, object] = {
            "num_tokens": 12 * len(priorities),
            "enable_priority_scheduling": True,
            "schedule_conservativeness": 0.0,
            "overlap": False,
            **schedule,
        }
        stepping = Stepping(**options)  # type: ignore[arg-type]
        for i, priority in enumerate(priorities):
            stepping.add(new_req(f"r{i}", [50 * i + j for j in range(9)], 8, priority=priority))
        assert len(rids(stepping.step())) == len(priorities)
        return stepping

    def retracted(self, stepping: Stepping) -> set[str]:
        return {rid for rid, req in {**stepping.live, **stepping.done}.items() if req.num_retractions}

    @pytest.mark.parametrize(
        ("running", "priority", "options", "retracted"),
        [
            pytest.param([0, 0, 0], 11, {}, 1, id="over the threshold"),
            pytest.param([0, 0, 0], 10, {}, 0, id="at the threshold"),
            pytest.param([0, 0, 0], 0, {}, 0, id="equal"),
            pytest.param([0, 0, 0], -50, {}, 0, id="lower"),
            pytest.param([0, 0], -11, {"schedule_low_priority_values_first": True}, 1, id="low values first"),
            pytest.param([0, 0], 900, {"enable_priority_scheduling": False}, 0, id="not enabled"),
            pytest.param([0, 0], 50, {"num_tokens": 400, "max_running_requests": 2}, 1, id="for a slot"),
        ],
    )
    def test_one_is_retracted_where_that_makes_room_for_one_that_counts_far_more(
        self, running: list[int], priority: int, options: dict[str, object], retracted: int
    ) -> None:
        stepping = self.full(running, **options)
        stepping.add(new_req("new", range(900, 909), 1, priority=priority))
        assert ("new" in rids(stepping.step())) is bool(retracted)
        assert len(self.retracted(stepping)) == retracted
        stepping.run()

    def test_the_lowest_goes_and_no_more_than_needed(self) -> None:
        stepping = self.full([5, 0, 3, 4])
        stepping.add(new_req("high", range(900, 909), 1, priority=50))
        assert rids(stepping.step()) == ["high"]
        assert self.retracted(stepping) == {"r1"}
        stepping.run()

    def test_who_would_not_make_room_is_left_alone(self) -> None:
        """36 tokens hold what may be retracted for it (12) and 24 that may not; it needs 16."""
        stepping = self.full([40, 0, 40])
        stepping.add(new_req("high", range(900, 916), 1, priority=45))
        before = len(stepping.batcher.running_batch)
        assert "high" not in rids(stepping.step())
        assert before <= 3 and not self.retracted(stepping)
        stepping.run()

    def test_the_retracted_keep_their_output_and_come_back(self) -> None:
        stepping = self.full([0, 0])
        for _ in range(3):
            stepping.step()
        known = {rid: list(req.ids) for rid, req in stepping.live.items()}
        stepping.add(new_req("high", range(900, 909), 1, priority=50))
        stepping.step()
        (victim,) = self.retracted(stepping)
        assert stepping.live[victim].ids[: len(known[victim])] == known[victim]
        assert stepping.live[victim].output_len >= 3
        stepping.run()

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=100)
    def test_victims_make_room_and_none_of_them_is_spare(self, seed: int) -> None:
        rng = random.Random(seed)
        candidates = [new_req(str(i), [1], 1) for i in range(rng.randrange(7))]
        gives = {id(req): (rng.randrange(4), rng.randrange(4)) for req in candidates}
        needs = rng.randrange(12), rng.randrange(12)

        def makes_room(victims: list[Req]) -> bool:
            return all(sum(gives[id(v)][k] for v in victims) >= needs[k] for k in (0, 1))

        victims = choose_victims(candidates, makes_room)  # type: ignore[arg-type]
        if not victims:
            assert not candidates or not makes_room(candidates) or makes_room([])
            return
        assert makes_room(victims)
        for spared in victims:
            assert not makes_room([victim for victim in victims if victim is not spared])
        first = next(n for n in range(len(candidates) + 1) if makes_room(candidates[:n]))
        assert set(victims) <= set(candidates[:first])


class TestKnownEnds:
    def test_requests_that_run_to_their_end_are_never_retracted(self) -> None:
        """With the default conservativeness: their ends are known, so nobody is admitted too early."""
        rng = random.Random(1)
        stepping = Stepping(num_tokens=320, page_size=4, max_running_requests=32)
        for i in range(40):
            ids = [rng.randrange(997) for _ in range(rng.randint(5, 30))]
            stepping.add(new_req(f"r{i}", ids, rng.randint(1, 60)))
        most = 0
        while stepping.live:
            stepping.step()
            most = max(most, len(stepping.batcher.running_batch))
        stepping.run()
        assert stepping.batcher.num_retractions == 0
        assert most > 5

    def test_they_are_packed_closer_than_their_sum(self) -> None:
        """30 + 4 and 4 + 30 tokens of a pool of 40: one gives its pages back before the other needs them."""
        stepping = Stepping(num_tokens=48, page_size=1)
        stepping.add(new_req("short", range(30), 5), new_req("long", range(500, 504), 31))
        assert rids(stepping.step()) == ["short", "long"]
        stepping.run()
        assert stepping.batcher.num_retractions == 0

    def test_what_is_not_known_is_estimated(self) -> None:
        stepping = Stepping(num_tokens=48, page_size=1)
        stepping.add(new_req("short", range(30), 5, ignore_eos=False))
        stepping.add(new_req("long", range(500, 504), 31, ignore_eos=False))
        assert rids(stepping.step()) == ["short"]
        stepping.run()
