"""What the page says of a node's links."""

from __future__ import annotations

from router.api.live_state import links_words
from shared.protocol.messages import LinkReport

FAR = {"shm": "the nodes are not on one host"}


def test_links_of_one_transport_are_told_together_with_what_they_measured() -> None:
    links = [LinkReport(f"p{n}", True, "tcp", gb_s=1.25 + n, latency_ms=0.2) for n in range(3)]
    assert links_words(links) == ["3 tcp, 1.2 to 3.2 GB/s, 0.2 ms"]


def test_each_reason_for_no_better_transport_is_told() -> None:
    links = [
        LinkReport("p0", True, "shm", 8.0, 0.1),
        LinkReport("p1", True, "gloo", 2.0, 0.3, FAR),
        LinkReport("p2", False, "gloo", 2.0, 0.3, FAR),
        LinkReport("p3", True, "gloo", 2.0, 0.3, {"shm": "rehearsal: message 0 arrived corrupt"}),
    ]
    assert links_words(links) == [
        "1 gloo, 2 GB/s, 0.3 ms; not shm: rehearsal: message 0 arrived corrupt",
        "2 gloo, 2 GB/s, 0.3 ms; not shm: the nodes are not on one host",
        "1 shm, 8 GB/s, 0.1 ms",
    ]


def test_links_that_have_become_slow_are_counted() -> None:
    links = [LinkReport("p0", True, "tls", 0.8, 0.3, {}, 0.015), LinkReport("p1", True, "tls", 0.8, 0.3)]
    assert links_words(links) == ["2 tls, 0.8 GB/s, 0.3 ms, 1 slow now: 0.015 GB/s"]


def test_large_figures_have_no_exponent() -> None:
    links = [LinkReport("p0", True, "shm", 11.4, 347.2), LinkReport("p1", True, "shm", 0.017, 0.84)]
    assert links_words(links) == ["2 shm, 0.017 to 11 GB/s, 0.84 to 347 ms"]


def test_links_that_were_not_rehearsed_have_no_figures() -> None:
    assert links_words([LinkReport("p0", True, "shm")]) == ["1 shm"]
    assert links_words([]) == []
