"""When a peer counts as silent."""

from __future__ import annotations

import pytest

from shared.protocol.heartbeat import Heartbeat


def test_a_peer_that_answers_is_not_silent() -> None:
    beat = Heartbeat(ping_s=1, timeout_s=3, now=0)
    for now in range(100):
        assert not beat.silent(now)
        assert beat.ping_due(now)
        assert not beat.ping_due(now + 0.5)
        beat.heard(now + 0.6)


@pytest.mark.parametrize("answered_after", [0.0, 0.1, 0.9])
def test_a_peer_that_stops_answering_is_silent_within_the_timeout(answered_after: float) -> None:
    beat = Heartbeat(ping_s=1, timeout_s=3, now=0)
    assert beat.ping_due(0)
    beat.heard(answered_after)
    silent_at = None
    for tenth in range(1, 100):
        now = tenth / 10
        if beat.silent(now) and silent_at is None:
            silent_at = now
        beat.ping_due(now)
    assert silent_at is not None
    assert 2 < silent_at - answered_after <= 3
    beat.heard(20)
    assert not beat.silent(30)


def test_our_own_sleep_does_not_condemn_the_peer() -> None:
    beat = Heartbeat(ping_s=1, timeout_s=3, now=0)
    beat.ping_due(0.0)
    # This process was stopped for a minute; the answer waits to be read.
    assert not beat.silent(60)
    assert beat.ping_due(60)
    assert not beat.silent(60.01)
    beat.heard(60.02)
    assert not beat.silent(61)
