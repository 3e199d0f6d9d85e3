"""A link that has become much slower than its rehearsal is reported, once."""

from __future__ import annotations

import logging

import pytest

from shared.kvtransfer.link import LinkRate
from shared.kvtransfer.pace import NUM_WINDOWS, Pace
from shared.protocol.messages import ReqKey
from tests.unit.kvtransfer.test_receive_worker import Rig

MIB = 1 << 20
RATE = LinkRate(gb_s=1.0, latency_ms=0.5)


class Moving:
    """Chunks of 4 MiB over a link that was rehearsed at 1 GB/s, under a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pace = Pace("l", "gloo", RATE, lambda: self.now)

    def move(self, num_chunks: int, gb_s: float, nbytes: int = 4 * MIB) -> None:
        self.pace.begins()
        for _ in range(num_chunks):
            self.now += nbytes / gb_s / 1e9
            self.pace.moved(nbytes)


CHUNKS_A_WINDOW = 3
"""Of 4 MiB: 12.6 ms at 1 GB/s."""


@pytest.fixture
def moving(caplog: pytest.LogCaptureFixture) -> Moving:
    caplog.set_level(logging.INFO)
    return Moving()


def test_a_link_at_a_fifth_of_its_rehearsal_is_reported_once_it_has_been_for_some_windows(
    moving: Moving, caplog: pytest.LogCaptureFixture
) -> None:
    moving.move((NUM_WINDOWS - 1) * CHUNKS_A_WINDOW, gb_s=0.2)
    assert moving.pace.slow_gb_s == 0 and not caplog.messages
    moving.move(3 * CHUNKS_A_WINDOW, gb_s=0.2)
    assert moving.pace.slow_gb_s == pytest.approx(0.2)
    assert caplog.messages == ["link_slow link=l transport=gloo gb_s=0.2 rehearsed_gb_s=1"]


def test_a_link_that_is_as_fast_as_before_is_slow_no_more_and_not_reported_again(
    moving: Moving, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        moving.move((NUM_WINDOWS + 1) * CHUNKS_A_WINDOW, gb_s=0.2)
        assert moving.pace.slow_gb_s > 0
        moving.move(2 * CHUNKS_A_WINDOW, gb_s=0.4)
        assert moving.pace.slow_gb_s == pytest.approx(0.4), "2.5 times slower, and it has been slow"
        moving.move(2 * CHUNKS_A_WINDOW, gb_s=0.9)
        assert moving.pace.slow_gb_s == 0
    assert len(caplog.messages) == 1


def test_a_link_is_not_slow_while_it_is_idle_or_a_third_as_fast(moving: Moving) -> None:
    for _ in range(20):
        moving.now += 3600
        moving.move(CHUNKS_A_WINDOW, gb_s=0.3)
        assert moving.pace.slow_gb_s == 0


def test_small_transfers_say_nothing(moving: Moving) -> None:
    for _ in range(1000):
        moving.move(2, gb_s=0.01)
        assert moving.pace.slow_gb_s == 0


def test_the_loop_times_chunks_from_their_grant_until_they_are_taken_in() -> None:
    now, rate = 5.0, LinkRate(gb_s=1.3e-6, latency_ms=1.0)
    rig = Rig(clock=lambda: now, rehearse=lambda link, spec, fail: rate)
    key = ReqKey("r", "0", 0)
    for _ in range(NUM_WINDOWS):  # two chunks are a window
        now += 1000.0
        rig.offer(key, 0, 1)
        rig.worker.step(block=False)
        now += 1.0
        rig.arrive()
    assert {arrival.slot.buffer.numel() for arrival in rig.link.arrivals} == {8}
    assert rig.worker._pace is not None
    assert rig.worker._pace.slow_gb_s == pytest.approx(16 / 1e9), (
        "in the second that they took, not in the pauses"
    )
