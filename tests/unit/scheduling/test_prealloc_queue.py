"""The prealloc queue by itself: what fits, what a lookup costs, and what it leaves alone. page_size is 4."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from decode_node.prealloc_queue import PreallocQueue
from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.protocol.messages import NodeRef, ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import ReqStage, Timeline
from tests.unit.scheduling.conftest import MakeLedger, MakeReq, cache_prefix

PREFILL = NodeRef("p0", "p0", "sim")
OPEN = {"is_open_to": lambda req: True, "is_open_to_move": lambda req: True}
CLOSED = {"is_open_to": lambda req: False, "is_open_to_move": lambda req: False}


class NotedTransfers:
    """A receiver that only notes what was opened."""

    def __init__(self) -> None:
        self.opened: list[ReqKey] = []

        self.num_pages: dict[ReqKey, int] = {}

    def open(
        self,
        key: ReqKey,
        peer_id: str,
        page_ids: Sequence[int],
        prefix_pages: int,
        num_known: int | None = None,
        window_ids: Sequence[int] = (),
    ) -> None:
        self.opened.append(key)
        self.num_pages[key] = prefix_pages + len(page_ids)


def make_queue(ledger: KVLedger, *, num_reserved_decode_tokens: int = 0) -> tuple[PreallocQueue, Batcher]:
    options = ScheduleOptions(num_reserved_decode_tokens=num_reserved_decode_tokens)
    batcher = Batcher(ledger, options)
    return PreallocQueue(ledger, NotedTransfers(), options, batcher.in_order, lambda: 0.0), batcher  # type: ignore[arg-type]


def enqueue(queue: PreallocQueue, batcher: Batcher, *reqs: Req) -> None:
    for req in reqs:
        batcher.arrived(req)
        queue.add(req, PREFILL)


class ReadIds(list[int]):
    """Counts how often its tokens are read, as each lookup does."""

    num_reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.num_reads += 1
        return super().__iter__()


def num_reads(req: Req, call: Callable[[], object]) -> int:
    """How often a call reads the tokens of a request."""
    ids = req.ids = ReadIds(req.ids)
    call()
    return ids.num_reads


class ComparedReq(Req):
    """Counts its comparisons with other requests, which `in` and `remove` of a list make."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedReq.num_compared += 1
        return self is other

    __hash__ = object.__hash__


@pytest.mark.parametrize("waits_for", ["transfer", "prefill", "resume"])
def test_a_request_that_ends_is_found_without_comparing_it_with_others(
    waits_for: str, make_kv_ledger: MakeLedger
) -> None:
    def cost(num_reqs: int) -> int:
        ledger = make_kv_ledger(num_reqs, num_rows=num_reqs)
        queue, batcher = make_queue(ledger)
        reqs = [new_req(f"r{i}", (i,), made_by=ComparedReq) for i in range(num_reqs)]
        for req in reqs:
            if waits_for == "transfer":
                enqueue(queue, batcher, req)
            elif waits_for == "prefill":
                batcher.add(req)
            else:
                req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
                req.timeline.move_to(ReqStage.PREFILLING)
                req.timeline.move_to(ReqStage.DECODING)
                batcher.retraction.retract_now(req)
        last, before = reqs[-1], ComparedReq.num_compared
        queue.remove(last)
        batcher.remove(last)
        return ComparedReq.num_compared - before

    assert cost(400) == cost(20)


def test_a_blocked_request_is_looked_up_anew_only_when_the_tree_has_changed(
    make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    ledger = make_kv_ledger(200)
    queue, batcher = make_queue(ledger)
    req, other = make_req(4 * 201), make_req(8)
    cache_prefix(ledger, req.ids[:800])
    enqueue(queue, batcher, req)
    assert num_reads(req, lambda: queue.reserve(**OPEN))
    assert not num_reads(req, lambda: queue.reserve(**OPEN))
    ledger.radix_cache.evict(1)
    cache_prefix(ledger, other.ids[:4])
    assert num_reads(req, lambda: queue.reserve(**OPEN))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_blocked_local_prompt_is_looked_up_anew_only_when_the_tree_has_changed(
    ignore_eos: bool, make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    ledger = make_kv_ledger(200)
    batcher = Batcher(ledger, ScheduleOptions())
    req = make_req(4 * 200, max_new_tokens=9, ignore_eos=ignore_eos)
    cache_prefix(ledger, req.ids[:-4])
    batcher.add(req)
    first, _, third = (num_reads(req, batcher.plan) for _ in range(3))
    assert req.kv is None, "the prompt fits, and not its output"
    assert first > third == 0


def test_a_prefix_that_is_cached_meanwhile_is_found(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    """Of 8 pages a running request holds 4; the 6 of a waiting one fit when the two share those 4."""
    ledger = make_kv_ledger(8)
    queue, batcher = make_queue(ledger)
    req = make_req(24)
    kv = ledger.admit(ledger.radix_cache.match_prefix(req.ids), "")
    assert kv is not None and ledger.grow(kv, 16)
    enqueue(queue, batcher, req)
    assert queue.reserve(**OPEN).reserved == []
    kv.kv_committed_len = 16
    ledger.cache_unfinished_req(kv, req.ids[:16])
    assert queue.reserve(**OPEN).reserved == [req]


@pytest.mark.parametrize("is_local", [False, True])
def test_a_request_that_waits_does_not_use_the_prefix_it_waits_with(
    is_local: bool, make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    """Eviction is by use: the prefix of a blocked request was used longest ago, and so goes first."""
    ledger = make_kv_ledger(8)
    queue, batcher = make_queue(ledger)
    blocked, other = make_req(36), make_req(8)
    cache_prefix(ledger, blocked.ids[:8])
    cache_prefix(ledger, other.ids)
    if is_local:
        batcher.add(blocked)
    else:
        enqueue(queue, batcher, blocked)
    for _ in range(3):
        assert batcher.plan().batch is None
        assert queue.reserve(**OPEN).reserved == []
    ledger.allocator.free(ledger.radix_cache.evict(2))
    assert ledger.radix_cache.peek(blocked.ids, 8).num_pages == 0
    assert ledger.radix_cache.peek(other.ids, 8).num_pages == 2


@pytest.mark.parametrize("window", [None, 9, 30])
def test_what_would_fit_is_what_fits(make_kv_ledger: MakeLedger, window: int | None) -> None:
    """Also without some running requests, over prefixes that these hold, that others hold, and that none holds."""
    fits = [both_fit(random.Random(seed), make_kv_ledger, window) for seed in range(400)]
    assert all(predicted == actual for predicted, actual in fits)
    assert 50 < sum(actual for _, actual in fits) < 350


def both_fit(rng: random.Random, make_kv_ledger: MakeLedger, window: int | None) -> tuple[bool, bool]:
    """Whether a request would fit if some victims were gone, and whether it does when they are."""
    ledger = make_kv_ledger(rng.randint(16, 40), num_rows=rng.randint(3, 8), window=window)
    queue, batcher = make_queue(ledger, num_reserved_decode_tokens=rng.choice([0, 3]))
    stems = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]

    def some_ids() -> tuple[int, ...]:
        return (
            *rng.choice(stems)[: rng.randint(4, 24)],
            *(rng.randrange(9, 99) for _ in range(rng.randint(0, 40))),
        )

    running: list[tuple[ReqKV, tuple[int, ...]]] = []
    for _ in range(rng.randint(1, 5)):
        ids = some_ids()
        kv = ledger.admit(ledger.match_prefix(ids, ""), "")
        if kv is None or not ledger.grow(kv, len(ids)):
            break
        kv.kv_committed_len = len(ids)
        ledger.cache_unfinished_req(kv, ids)
        ledger.slide(kv)
        running.append((kv, ids))
    for kv, ids in running[3:]:
        ledger.cache_finished_req(kv, ids)
    victims = [new_req(f"v{i}", ids, kv) for i, (kv, ids) in enumerate(running[: rng.randrange(3)])]
    req = new_req("r", some_ids())
    enqueue(queue, batcher, req)
    predicted = queue.would_fit(req, victims)
    for victim in victims:
        assert victim.kv is not None
        ledger.cache_finished_req(victim.kv, victim.ids)
    return predicted, queue.reserve(**OPEN).reserved == [req]


def new_req(rid: str, ids: tuple[int, ...], kv: ReqKV | None = None, *, made_by: type[Req] = Req) -> Req:
    req = made_by(ReqKey("router", rid), Work(ids, SamplingParams()), Timeline(Role.DECODE), 9)
    req.kv = kv
    return req


def test_a_request_is_reserved_window_pages_for_its_last_window_alone(
    make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    """Its 10 pages are more than can have window pages: 8 of 12."""
    queue, batcher = make_queue(make_kv_ledger(12, window=9))
    req = make_req(40)
    enqueue(queue, batcher, req)
    assert queue.reserve(**OPEN).reserved == [req]


def test_a_request_that_waits_for_a_row_closes_admission_to_later_ones(
    make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    _, batcher = make_queue(make_kv_ledger(num_rows=1))
    running, waiting, later = (make_req(max_new_tokens=4) for _ in range(3))
    batcher.add(running)
    assert batcher.plan().batch is not None
    batcher.add(waiting)
    batcher.arrived(later)
    batcher.plan()
    assert batcher.first_blocked() is waiting
    assert not batcher.is_open_to(later, waiting)


def test_no_request_overtakes_one_that_does_not_fit_until_that_has_ended(make_kv_ledger: MakeLedger) -> None:
    queue, batcher = make_queue(make_kv_ledger(4))
    long, short = new_req("long", tuple(range(20))), new_req("short", (1, 2, 3))
    enqueue(queue, batcher, long, short)
    assert queue.reserve(**OPEN).reserved == []
    assert queue.first is not None and queue.first.req is long
    queue.remove(long)
    assert queue.first is None
    assert queue.reserve(**OPEN).reserved == [short]


@pytest.mark.parametrize("extra_key", ["", "another"])
def test_only_the_prefix_of_its_own_namespace_makes_room(make_kv_ledger: MakeLedger, extra_key: str) -> None:
    """Nine pages in a pool of eight, seven of which are cached, and read by another request."""
    ledger = make_kv_ledger(8)
    ids = tuple(range(100, 133))
    cache_prefix(ledger, ids[:28])
    held = ledger.radix_cache.lock(ledger.radix_cache.match_prefix(ids[:28]).node)
    queue, batcher = make_queue(ledger)
    work = Work(ids[:32], SamplingParams(), extra_key=extra_key)
    req = Req(ReqKey("router", "r"), work, Timeline(Role.DECODE), 9)
    enqueue(queue, batcher, req)
    assert queue.would_fit(req, ()) == (not extra_key)
    assert queue.reserve(**OPEN).reserved == ([] if extra_key else [req])
    held.release()


def test_the_longest_wait_is_that_of_the_first_to_come(make_kv_ledger: MakeLedger) -> None:
    ledger, now = make_kv_ledger(16), 10.0
    options = ScheduleOptions()
    batcher = Batcher(ledger, options)
    queue = PreallocQueue(ledger, NotedTransfers(), options, batcher.in_order, lambda: now)  # type: ignore[arg-type]
    assert queue.longest_wait_s == 0.0
    first, second = new_req("1", (1, 2, 3)), new_req("2", (1, 2, 3))
    enqueue(queue, batcher, first)
    now = 12.0
    enqueue(queue, batcher, second)
    now = 15.0
    assert queue.longest_wait_s == 5.0
    queue.remove(first)
    assert queue.longest_wait_s == 3.0
