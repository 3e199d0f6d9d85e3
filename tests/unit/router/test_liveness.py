"""When silence is death."""

from __future__ import annotations

from router.nodes.live_node import Liveness
from shared.protocol.messages import Load


def liveness() -> Liveness:
    return Liveness(0.0, timeout_s=10.0, interval_s=1.0)


def ticks(node: Liveness, start: int, end: int, progress: int | None) -> str | None:
    for now in range(start, end):
        if progress is not None:
            node.pong(float(now), Load(progress=progress))
        verdict = node.tick(float(now))
        if verdict:
            return verdict
    return None


def test_no_pong() -> None:
    verdict = ticks(liveness(), 1, 100, None)
    assert verdict is not None and verdict.startswith("no answer for 10")


def test_a_timer_that_is_early_costs_no_second() -> None:
    """The timers of a busy event loop end up to a millisecond early."""
    silent, stuck = liveness(), liveness()
    ends = dict.fromkeys(("silent", "stuck"), 0.0)
    for n in range(1, 15):
        now = n * 0.9995
        stuck.pong(now, Load(progress=5))
        for name, node in (("silent", silent), ("stuck", stuck)):
            if node.tick(now) and not ends[name]:
                ends[name] = now
    assert 9 < ends["silent"] <= 10 and 9 < ends["stuck"] <= 11


def test_half_of_the_timeout_is_silence() -> None:
    node = liveness()
    node.pong(1.0, Load())
    assert not node.is_silent(5.0) and node.is_silent(6.0)


def test_without_progress_a_node_is_dead() -> None:
    assert ticks(liveness(), 1, 100, 5) == "no progress for 10.0 s"


def test_with_progress_it_is_alive() -> None:
    node = liveness()
    assert all(ticks(node, now, now + 1, now) is None for now in range(1, 100))


def test_progress_starts_the_clock_anew() -> None:
    node = liveness()
    assert ticks(node, 1, 10, 5) is None
    assert ticks(node, 10, 20, 6) is None
    assert ticks(node, 20, 22, 6) is not None


def test_silence_is_not_counted_as_standing_still() -> None:
    node = liveness()
    assert ticks(node, 1, 6, 5) is None
    assert ticks(node, 6, 14, None) is None


def test_pongs_that_were_asked_for_between_pings_do_not_count() -> None:
    """Each scrape of /metrics asks for one, and a node sends one when a link comes or goes."""
    node = liveness()
    for now in range(1, 10):
        for _ in range(20):
            node.pong(float(now), Load(progress=5))
        assert node.tick(float(now)) is None
        assert node.tick(float(now)) is None, "no time has passed"


def test_time_in_which_the_router_itself_was_stopped_does_not_count() -> None:
    node = liveness()
    assert ticks(node, 1, 5, 0) is None
    assert node.tick(60.0) is None
    node.pong(60.1, Load(progress=1))
    assert node.tick(61.0) is None
