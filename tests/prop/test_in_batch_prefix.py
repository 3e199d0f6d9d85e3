"""In-batch prefix caching over whole runs: nobody computes what another computes, nobody is passed over for less."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import POLICIES
from tests.prop.stepping import Stepping, new_req


def burst(rng: random.Random, count: int) -> list[Req]:
    """Prompts that branch off one another, of two strangers."""
    prompts = [[rng.randrange(997) for _ in range(rng.randint(10, 60))] for _ in range(2)]
    for _ in range(count):
        known = rng.choice(prompts)
        own = [rng.randrange(997) for _ in range(rng.randint(1, 30))]
        prompts.append(known[: rng.randint(0, len(known))] + own)
    return [new_req(f"r{i:02d}", ids, rng.randint(1, 6)) for i, ids in enumerate(prompts[2:])]


def shared_len(req: Req, other: Req, page_size: int) -> int:
    """Tokens of the whole pages that `req` could take from `other`."""
    pairs = zip(req.ids[: req.num_input_ids - 1], other.ids[: other.num_input_ids], strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    length = min(req.num_input_ids - 1, other.num_input_ids) if same is None else same
    return length // page_size * page_size


def passed_over(batch: ScheduleBatch | None, waiting: Sequence[Req], before: Sequence[Req]) -> list[Req]:
    """Of those who wait, who had come before somebody that this batch admits; `before` held KV already."""
    if batch is None:
        return []
    admitted = [item.req.key.rid for item in batch.extends if item.req not in before]
    return [req for req in waiting if any(req.key.rid < rid for rid in admitted)]


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12)
def test_no_shared_prefix_is_computed_twice(policy: str, seed: int) -> None:
    """With room for all: each computes less than the threshold of what was admitted before it elsewhere."""
    rng = random.Random(seed)
    page_size, worth = rng.choice([1, 2, 4, 16]), rng.choice([1, 8, 32])
    stepping = Stepping(
        num_tokens=8192,
        page_size=page_size,
        overlap=rng.random() < 0.6,
        schedule_policy=policy,
        chunked_prefill_size=rng.choice([5, 16, 64, 512]),
        enable_mixed_chunk=rng.random() < 0.5,
        in_batch_prefix_caching_deprioritize_threshold=worth,
    )
    pending = burst(rng, 12)[::-1]
    admitted: list[Req] = []
    while pending or stepping.live:
        while pending and rng.random() < 0.8:
            stepping.add(pending.pop())
        batch = stepping.step()
        admitted += [item.req for item in (batch.extends if batch else ()) if item.req not in admitted]
    stepping.run()
    for i, req in enumerate(admitted):
        elsewhere = max((shared_len(req, other, page_size) for other in admitted[:i]), default=0)
        assert elsewhere - req.cached_tokens < worth


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_first_come_first_served_but_for_those_who_wait_for_a_prefix(seed: int) -> None:
    """Whoever is passed over shares enough with one who came earlier and is computing it, and only by whole prompts.

    Clients go away meanwhile.
    """
    rng = random.Random(seed)
    page_size, worth = rng.choice([1, 2, 4]), rng.choice([1, 8, 32])
    stepping = Stepping(
        num_tokens=8192,
        page_size=page_size,
        overlap=rng.random() < 0.6,
        chunked_prefill_size=rng.choice([5, 16, 64]),
        max_running_requests=rng.choice([3, 64]),
        in_batch_prefix_caching_deprioritize_threshold=worth,
        short_prompt_share=0.0,
    )
    pending = burst(rng, 14)[::-1]
    in_flight: list[Req] = []
    while pending or stepping.live:
        while pending and rng.random() < 0.6:
            stepping.add(pending.pop())
        if stepping.live and rng.random() < 0.1:
            stepping.end(stepping.live[rng.choice(sorted(stepping.live))])
        with_kv = [req for req in stepping.live.values() if req.kv is not None]
        had = {req: req.kv.kv_committed_len // page_size * page_size for req in with_kv if req.kv is not None}
        uncommitted = [
            req for req in in_flight if req in had and req.kv_len // page_size * page_size > had[req]
        ]
        batch = stepping.step()
        in_batch = [item.req for item in batch.extends] if batch else []
        for req in passed_over(batch, stepping.batcher.waiting_queue, with_kv):
            leaders = [other for other in (*uncommitted, *in_batch) if other.key.rid < req.key.rid]
            assert any(
                (shared := shared_len(req, other, page_size)) - min(shared, had.get(other, 0)) >= worth
                for other in leaders
            )
            chunked = stepping.batcher.chunked_req
            assert chunked is None or chunked in with_kv or chunked.key.rid < req.key.rid
        in_flight = in_batch
    stepping.run()
