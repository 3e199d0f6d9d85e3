from __future__ import annotations

import pytest

from shared.scheduling.prefill_adder import (
    DECAY_STEPS,
    INIT_RATIO,
    MIN_RATIO_FACTOR,
    RETRACT_LOOKAHEAD_TOKENS,
    NewTokenRatio,
)
from tests.unit.scheduling.conftest import MakeReq


def test_it_falls_to_its_minimum_and_stays_there() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == INIT_RATIO
    for _ in range(DECAY_STEPS // 2):
        ratio.decay()
    assert ratio.value == pytest.approx(INIT_RATIO * (1 + MIN_RATIO_FACTOR) / 2)
    for _ in range(DECAY_STEPS):
        ratio.decay()
    assert ratio.value == pytest.approx(INIT_RATIO * MIN_RATIO_FACTOR)
    ratio.reset()
    assert ratio.value == INIT_RATIO


@pytest.mark.parametrize(("conservativeness", "initial"), [(0.0, 0.0), (0.5, 0.35), (1.0, 0.7), (10.0, 1.0)])
def test_conservativeness_scales_it_up_to_one(conservativeness: float, initial: float) -> None:
    assert NewTokenRatio(conservativeness).value == pytest.approx(initial)


def test_a_retraction_raises_it_to_what_was_used(make_req: MakeReq) -> None:
    ratio = NewTokenRatio(0.0)
    running = [make_req(max_new_tokens=100, output_ids=range(10)), make_req(max_new_tokens=300)]
    ratio.rise_after_retraction(running)
    assert ratio.value == pytest.approx((10 + 2 * RETRACT_LOOKAHEAD_TOKENS) / 400)


def test_a_retraction_never_lowers_it_nor_lifts_it_above_one(make_req: MakeReq) -> None:
    ratio = NewTokenRatio(1.0)
    ratio.rise_after_retraction([make_req(max_new_tokens=10_000)])
    assert ratio.value == INIT_RATIO
    ratio.rise_after_retraction([make_req(max_new_tokens=12, output_ids=range(11))])
    assert ratio.value == 1.0
    ratio.rise_after_retraction([])
    assert ratio.value == 1.0
