from __future__ import annotations

import random

import pytest

from router.dispatch.metrics import WINDOW_ROLLS, LatencyWindow


def exact(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)]


@pytest.mark.parametrize("typical_s", [0.0003, 0.02, 3.0])
def test_percentiles_are_within_four_percent(typical_s: float) -> None:
    chance = random.Random(7)
    values = [typical_s * chance.lognormvariate(0, 1) for _ in range(5000)]
    window = LatencyWindow()
    for at, value in enumerate(values):
        window.observe(value)
        if at % 1000 == 999:
            window.roll()
    found = window.percentiles((0.5, 0.9, 0.99))
    assert found == pytest.approx([exact(values, share) for share in (0.5, 0.9, 0.99)], rel=0.04)


def test_a_count_weighs_as_many_observations() -> None:
    window = LatencyWindow()
    window.observe(0.01, 99)
    window.observe(5.0)
    window.roll()
    assert window.percentiles((0.5, 0.99, 1.0)) == pytest.approx((0.01, 0.01, 5.0), rel=0.04)


def test_nothing_observed_is_no_percentile() -> None:
    window = LatencyWindow()
    assert window.percentiles((0.5,)) is None
    window.observe(1.0)
    assert window.percentiles((0.5,)) is None, "the open interval is not told"


def test_the_window_slides() -> None:
    window = LatencyWindow()
    window.observe(8.0)
    window.roll()
    for _ in range(WINDOW_ROLLS - 1):
        window.roll()
        assert window.percentiles((0.5,)) is not None
    window.roll()
    assert window.percentiles((0.5,)) is None


@pytest.mark.parametrize("seconds", [0.0, -0.001, 1e-9, 1e9])
def test_what_no_bucket_fits_goes_to_the_nearest(seconds: float) -> None:
    window = LatencyWindow()
    window.observe(seconds)
    window.roll()
    found = window.percentiles((1.0,))
    assert found is not None and 0 < found[0] < 2e4
