"""What a node tells of itself."""

from __future__ import annotations

import pytest

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.engine.progress import Progress
from shared.engine.vitals import MAX_LEAK_CHARS, MIN_MEASURED_NBYTES, MIN_MEASURED_TOKENS, Vitals
from shared.kvcache.windows import WindowPages
from shared.protocol.messages import Load
from shared.scheduling.retraction import RetractionCounts


def publish(vitals: Vitals, *, idle: bool) -> Load:
    vitals.publish(Load(), RetractionCounts(), idle=idle)
    return vitals.load()


def test_a_leak_that_the_idle_audit_finds_is_in_every_load_from_then_on() -> None:
    ledger = make_ledger(500, CacheOptions(), 4, 64)
    vitals = Vitals(ledger, Progress(), lambda: 0.0)
    assert not publish(vitals, idle=True).leak
    lost = ledger.allocator.alloc(400)
    assert lost is not None
    assert not publish(vitals, idle=False).leak
    publish(vitals, idle=True)
    for idle in (True, False, True):
        leak = publish(vitals, idle=idle).leak
        assert f"with none [{min(lost)}, " in leak
        assert len(leak) <= MAX_LEAK_CHARS


def test_window_pages_that_no_request_sees_are_available() -> None:
    windows = WindowPages(500, 41, window=16, page_size=16)
    vitals = Vitals(make_ledger(500, CacheOptions(), 4, 64, windows=windows), Progress(), lambda: 0.0)
    windows.take([3, 5, 7], for_arrival=False)
    windows.enter_tree([7], [7])
    load = publish(vitals, idle=False)
    assert (load.num_window_pages, load.num_available_window_pages) == (40, 38)


def test_a_short_prefill_is_busy_time_and_no_measurement() -> None:
    vitals = Vitals(make_ledger(500, CacheOptions(), 4, 64), Progress(), lambda: 0.0)
    vitals.count_prefill(MIN_MEASURED_TOKENS - 1, 2.0)
    load = publish(vitals, idle=False)
    assert (load.prefill_busy_s, load.prefill_tokens_per_s) == (2.0, 0.0)
    vitals.count_prefill(MIN_MEASURED_TOKENS, 1.0)
    load = publish(vitals, idle=False)
    assert load.prefill_busy_s == 3.0 and load.prefill_tokens_per_s > 0


def test_the_rate_of_transfers_is_that_of_late_and_large_ones_that_ended_well() -> None:
    vitals = Vitals(make_ledger(500, CacheOptions(), 4, 64), Progress(), lambda: 0.0)
    vitals.count_transfer(MIN_MEASURED_NBYTES - 1, 10.0)
    vitals.count_transfer(MIN_MEASURED_NBYTES, 5.0, ok=False)
    load = publish(vitals, idle=False)
    assert (load.kv_bytes_transferred, load.kv_transfer_s) == (2 * MIN_MEASURED_NBYTES - 1, 15.0)
    assert load.kv_bytes_per_s == 0
    for seconds in (*[0.1] * 100, *[10.0] * 100):  # a network that was fast, and is slow
        vitals.count_transfer(MIN_MEASURED_NBYTES, seconds)
    slow = publish(vitals, idle=False).kv_bytes_per_s
    assert slow == pytest.approx(MIN_MEASURED_NBYTES / 10.0, rel=0.01)
