"""Each budget of the PrefillAdder by itself, at its boundary; page_size is 4."""

from __future__ import annotations

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.plan import schedule
from shared.scheduling.prefill_adder import MAX_RESERVED_OUTPUT, AddReqResult, PrefillAdder
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import CachedPrefixes
from tests.unit.scheduling.conftest import MakeLedger, MakeReq, cache_prefix

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER


def make_adder(
    ledger: KVLedger,
    *,
    chunk: int = 1000,
    prefill: int = 1000,
    running: tuple[Req, ...] = (),
    ratio: float = 1.0,
) -> PrefillAdder:
    options = ScheduleOptions(chunked_prefill_size=chunk, max_prefill_tokens=prefill, short_prompt_share=0.0)
    return PrefillAdder(ledger, CachedPrefixes(ledger), options, running, ratio)


class TestPages:
    def test_prompt_and_expected_output_must_fit(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        """12 prompt tokens and 8 of the 9 wanted are 5 pages; the last token's KV is never computed.

        The ratio scales what is expected, of which a bounded share is reserved.
        """
        most = 1 + MAX_RESERVED_OUTPUT // 4
        for needed, num_ids, num_new, ratio in (
            (5, 12, 9, 1.0),
            (4, 12, 9, 0.5),
            (3, 12, 9, 0.0),
            (most, 4, 1_000_000, 1.0),
        ):
            for num_pages, expected in ((needed, CONTINUE), (needed - 1, NO_TOKEN)):
                adder = make_adder(make_kv_ledger(num_pages), ratio=ratio)
                assert adder.add_one_req(make_req(num_ids, max_new_tokens=num_new)) is expected

    def test_running_requests_keep_their_reserve(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        running = make_req(4, max_new_tokens=9)
        for free, expected in ((5, CONTINUE), (4, NO_TOKEN)):
            adder = make_adder(make_kv_ledger(free), running=(running,))
            assert adder.add_one_req(make_req(12, max_new_tokens=1)) is expected

    def test_pages_kept_for_a_request_are_there_for_no_other(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        adder = make_adder(make_kv_ledger(4))
        assert adder.keep_room_for(make_req(8, max_new_tokens=1), 0)
        assert not adder.lacks_room
        assert not adder.keep_room_for(make_req(8, max_new_tokens=1), 0)
        assert adder.lacks_room

    def test_each_admission_counts_for_the_next(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        adder = make_adder(make_kv_ledger(9))
        assert adder.add_one_req(make_req(12, max_new_tokens=9)) is CONTINUE
        assert adder.add_one_req(make_req(12, max_new_tokens=9)) is NO_TOKEN

    def test_a_refused_request_holds_nothing(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        ledger, req = make_kv_ledger(4), make_req(12, max_new_tokens=9)
        assert make_adder(ledger).add_one_req(req) is NO_TOKEN
        assert req.kv is None
        assert not ledger.live
        assert ledger.count().free == 4

    def test_evictable_pages_are_room(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        ledger = make_kv_ledger(4)
        cache_prefix(ledger, make_req(16).ids)
        assert ledger.count().evictable == 4
        assert make_adder(ledger).add_one_req(make_req(16, max_new_tokens=1)) is CONTINUE

    def test_the_matched_prefix_is_not_evicted_for_its_own_suffix(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        ledger = make_kv_ledger(4)
        first = make_req(8)
        cache_prefix(ledger, first.ids)
        other = make_req(8)
        cache_prefix(ledger, other.ids)
        again = make_req(8, max_new_tokens=1)
        again.ids = [*first.ids, *range(8)]
        again.num_input_ids = 16
        assert make_adder(ledger).add_one_req(again) is CONTINUE
        assert (again.cached_tokens, again.extend_len) == (8, 8)

    def test_the_window_of_a_cached_prefix_stays_and_what_lies_before_it_is_room(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        """8 of 16 window pages are of the prefix, of which the next token sees one."""
        for num_own, expected in ((15, CONTINUE), (16, NO_TOKEN)):
            ledger, first = make_kv_ledger(24, window=5), make_req(32)
            cache_prefix(ledger, first.ids)
            again = make_req(32 + 4 * num_own, max_new_tokens=1)
            again.ids[:32] = first.ids
            assert make_adder(ledger).add_one_req(again) is expected

    def test_a_whole_prompt_is_paged_at_its_first_chunk(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        req = make_req(30, max_new_tokens=1)
        make_adder(make_kv_ledger(), chunk=8).add_one_req(req)
        assert req.kv is not None
        assert req.kv.num_pages == 8


class TestChunkTokens:
    def test_a_prompt_that_fits_exactly_is_no_chunk(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        for num_ids, expected in ((10, CONTINUE), (11, OTHER)):
            adder, req = make_adder(make_kv_ledger(), chunk=10), make_req(num_ids, max_new_tokens=1)
            assert adder.add_one_req(req) is expected
            assert adder.chunked_req is (req if expected is OTHER else None)
            assert req.extend_len == 10

    def test_the_second_request_takes_what_is_left(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        adder = make_adder(make_kv_ledger(), chunk=10)
        first, second, third = (make_req(7, max_new_tokens=1) for _ in range(3))
        assert adder.add_one_req(first) is CONTINUE
        assert adder.add_one_req(second) is OTHER
        assert adder.add_one_req(third) is OTHER
        assert [req.extend_len for req in (first, second, third)] == [7, 3, 0]
        assert adder.can_run == [first, second]
        assert third.kv is None

    def test_the_next_chunk_goes_on_where_the_last_ended(
        self, make_kv_ledger: MakeLedger, make_req: MakeReq
    ) -> None:
        ledger, req = make_kv_ledger(), make_req(25, max_new_tokens=1)
        make_adder(ledger, chunk=10).add_one_req(req)
        lengths = [req.extend_len]
        for _ in range(2):
            schedule(req, req.extend_len, samples=False)
            adder = make_adder(ledger, chunk=10)
            result = adder.add_chunked_req(req)
            lengths.append(req.extend_len)
        assert lengths == [10, 10, 5]
        assert result is CONTINUE
        assert adder.chunked_req is None

    def test_a_chunked_request_keeps_its_reserve(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        """10 pages: 3 are the chunked request's, 2 its reserve; 5 are left."""
        for num_ids, expected in ((20, CONTINUE), (21, NO_TOKEN)):
            ledger, req = make_kv_ledger(10), make_req(12, max_new_tokens=9)
            make_adder(ledger, chunk=4).add_one_req(req)
            schedule(req, req.extend_len, samples=False)
            adder = make_adder(ledger)
            adder.add_chunked_req(req)
            assert adder.add_one_req(make_req(num_ids, max_new_tokens=1)) is expected


class TestPrefillTokens:
    def test_the_smaller_budget_cuts(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        adder, req = make_adder(make_kv_ledger(), chunk=100, prefill=6), make_req(7, max_new_tokens=1)
        assert adder.add_one_req(req) is OTHER
        assert req.extend_len == 6

    def test_it_counts_all_requests_of_the_batch(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        adder = make_adder(make_kv_ledger(), chunk=100, prefill=14)
        assert adder.add_one_req(make_req(7, max_new_tokens=1)) is CONTINUE
        assert adder.add_one_req(make_req(7, max_new_tokens=1)) is CONTINUE
        assert adder.add_one_req(make_req(7, max_new_tokens=1)) is OTHER
        assert len(adder.can_run) == 2

    def test_a_cached_prefix_costs_nothing(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        ledger, req = make_kv_ledger(), make_req(9, max_new_tokens=1)
        cache_prefix(ledger, req.ids)
        adder = make_adder(ledger, prefill=1)
        assert adder.add_one_req(req) is CONTINUE
        assert (req.extend_len, req.cached_tokens) == (1, 8)


class TestSlots:
    def test_no_row_is_no_admission(self, make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
        adder = make_adder(make_kv_ledger(num_rows=1))
        assert adder.add_one_req(make_req(4, max_new_tokens=1)) is CONTINUE
        assert adder.add_one_req(make_req(4, max_new_tokens=1)) is NO_TOKEN


def test_cached_tokens_do_not_fall_nor_count_outputs(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    """A retracted request finds its own outputs in the tree: that is no cached prompt."""
    ledger, req = make_kv_ledger(), make_req(6, max_new_tokens=9, output_ids=(1, 2, 3))
    cache_prefix(ledger, req.ids)
    req.cached_tokens = 4
    make_adder(ledger).add_one_req(req)
    assert req.kv is not None
    assert req.kv.kv_committed_len == 8
    assert req.cached_tokens == 6


def test_the_last_token_of_one_that_ignores_eos_needs_no_page(
    make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    """Three pages have room for 8 and 4 tokens, behind which one more is sampled."""
    fits, too_long = (make_req(8, max_new_tokens=num_new, ignore_eos=True) for num_new in (5, 6))
    assert make_adder(make_kv_ledger(3)).add_one_req(fits) is CONTINUE
    assert make_adder(make_kv_ledger(3)).add_one_req(too_long) is NO_TOKEN
