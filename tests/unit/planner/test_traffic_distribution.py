"""Traffic that is drawn has the rate and the lengths that were asked for."""

from __future__ import annotations

import statistics

import pytest

from planner.traffic.distribution import Lengths, drawn_trace
from planner.traffic.trace import shared_tokens
from shared.errors import ConfigError


def test_median_and_percentile_are_those_asked_for() -> None:
    prompt, output = Lengths.parse("--prompt", "900:2000"), Lengths.parse("--output", "150")
    trace = drawn_trace(rate=4, prompt=prompt, output=output, num_requests=20_000)
    lengths = sorted(row.input_len for row in trace.requests)
    assert lengths[10_000] == pytest.approx(900, rel=0.02) and lengths[19_800] == pytest.approx(
        2000, rel=0.05
    )
    assert {row.output_len for row in trace.requests} == {150}
    assert len(trace.requests) / trace.requests[-1].at_s == pytest.approx(4, rel=0.03)
    gaps = [
        after.at_s - before.at_s for before, after in zip(trace.requests, trace.requests[1:], strict=False)
    ]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05), "as Poisson has it"
    assert shared_tokens(trace.requests) == 0


def test_another_rate_has_the_same_requests() -> None:
    lengths = Lengths.parse("--prompt", "900:2000")
    slow, fast = (drawn_trace(rate=r, prompt=lengths, output=lengths, num_requests=50) for r in (1, 2))
    assert [row.input_len for row in slow.requests] == [row.input_len for row in fast.requests]
    assert [row.at_s for row in slow.requests] == pytest.approx([2 * row.at_s for row in fast.requests])


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "900:", ":900", "2000:900", "9..10", "1:10000001", "1" * 5000, "many", "1.5"]
)
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--output .*MEDIAN:P99"):
        print(Lengths.parse("--output", text))
