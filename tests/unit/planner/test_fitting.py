"""Planted costs come back from noisy rounds, and what is wrong with rounds is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost_model import CostModel
from planner.measure.fitting import Point, fit_transfers, nonnegative, remarks_of
from planner.measure.forwards import Forwards, MeasureLimits, extend_row, tasks_of
from planner.profile import MAX_BYTES_S, Residual
from shared.protocol.messages import NodeLimits

LIMITS = NodeLimits(context_length=8192, max_total_num_tokens=131_072, max_running_requests=64)
TASKS = tasks_of(LIMITS, 512, 16, has_cache=True, effort=MeasureLimits())
CPU = CostModel(
    a=7e-4, b=4.5e-5, c=1.1e-8, d=6e-4, e=7e-5, f=1.4e-7, floor_s=2.4e-3, step_s=2.5e-4, step_request_s=1e-5
)
GPU = CostModel(
    a=5e-3, b=3e-5, c=1e-10, d=9e-3, e=2e-5, f=4e-8, floor_s=9e-3, step_s=1e-3, step_request_s=5e-6
)

positive = st.floats(0.2, 5.0)


def rounds_of(seconds: float, noise: random.Random, number: int = 9) -> tuple[float, ...]:
    """Rounds that others have made longer: most by little, a quarter by up to half."""
    rounds = [
        seconds * (1 + 0.01 * noise.random() + (0.5 * noise.random() if i % 4 == 1 else 0.0))
        for i in range(number)
    ]
    noise.shuffle(rounds)
    return tuple(rounds)


def planted(costs: CostModel, seed: int = 0) -> Forwards:
    """What a device with these costs is measured at."""
    noise = random.Random(seed)

    def point(what: str, row: tuple[float, ...], seconds: float) -> Point:
        return Point(what=what, row=row, seconds=rounds_of(seconds, noise))

    return Forwards(
        extends=tuple(
            point(one.name, extend_row(one.spans), costs.extend_s(one.spans)) for one in TASKS if one.spans
        ),
        decodes=tuple(
            point(
                one.name,
                (1, one.batch, one.batch * one.context),
                costs.decode_s(one.batch, one.batch * one.context),
            )
            for one in TASKS
            if one.batch
        ),
        hosts=tuple(
            point(f"scheduler {num}", (1, num), costs.host_s(num)) for num in (1, 2, 4, 8, 16, 32, 64)
        ),
    )


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["CPU", "GPU"])
def test_planted_costs_come_back(costs: CostModel) -> None:
    fitted, _ = planted(costs).fit()
    for name in ("b", "d", "f", "step_s", "floor_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name), rel=0.1), name
    assert fitted.extend_s([(4096, 512)]) == pytest.approx(costs.extend_s([(4096, 512)]), rel=0.05)
    assert fitted.decode_s(48, 48 * 1000) == pytest.approx(costs.decode_s(48, 48 * 1000), rel=0.05)
    assert fitted.host_s(48) == pytest.approx(costs.host_s(48), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(st.lists(positive, min_size=9, max_size=9), st.integers(0, 1000))
def test_any_planted_forward_is_predicted(factors: list[float], seed: int) -> None:
    """Costs around those of a CPU, each up to five times as much or as little."""
    names = asdict(CPU)
    costs = CostModel(
        **{name: value * factor for (name, value), factor in zip(names.items(), factors, strict=True)}
    )
    fitted, residuals = planted(costs, seed).fit()
    assert min(asdict(fitted).values()) >= 0
    for residual_ in residuals:
        assert abs(residual_.error) < 0.06, residual_


def test_a_short_chunk_is_predicted_where_whole_chunks_alone_are_above_the_floor() -> None:
    """They all have 512 tokens: a launch is not told from tokens, but 16 tokens take no third more."""
    _, residuals = planted(replace(CPU, a=5e-4, b=1.2e-5, c=2.4e-8, floor_s=6.7e-3)).fit()
    for residual_ in residuals:
        assert abs(residual_.error) < 0.06, residual_


def test_a_coefficient_is_never_negative() -> None:
    assert nonnegative([(1, n) for n in (1, 2, 4)], [0.4, 0.3, 0.2])[1] == 0.0
    assert nonnegative([(1, 0), (1, 0)], [1.0, 1.0]) == pytest.approx([1.0, 0.0])


@given(positive, positive)
def test_a_planted_link_comes_back(latency: float, bandwidth: float) -> None:
    noise = random.Random(0)
    wanted_s, wanted_bytes_s = 1e-3 * latency, 2e9 * bandwidth
    points = [
        Point(what="", row=(1, nbytes), seconds=rounds_of(wanted_s + nbytes / wanted_bytes_s, noise))
        for nbytes in (1 << 14, 1 << 18, 1 << 22, 1 << 26)
    ]
    latency_s, bytes_s = fit_transfers(points)
    assert latency_s == pytest.approx(wanted_s, rel=0.05)
    assert bytes_s == pytest.approx(wanted_bytes_s, rel=0.05)


@pytest.mark.parametrize("sizes", [(4096,), (3, 7, 11), tuple(1 << bits for bits in range(14, 28, 2))])
def test_a_link_that_no_size_slows_down_takes_its_latency(sizes: tuple[int, ...]) -> None:
    """Least squares leave 1e-27 or so where a 0 belongs, on each CPU for other sizes."""
    points = [Point(what="", row=(1, nbytes), seconds=(0.0013,)) for nbytes in sizes]
    latency_s, bytes_s = fit_transfers(points)
    assert latency_s + sizes[-1] / bytes_s == pytest.approx(0.0013, rel=1e-3) and bytes_s <= MAX_BYTES_S


# ----------------------------------------------------------------------------------------------- remarks
def quiet(seconds: Callable[[int], Iterable[float]]) -> list[Point]:
    """Eight points."""
    return [Point(what=f"point {i}", row=(1,), seconds=tuple(seconds(i))) for i in range(8)]


def residuals(points: list[Point], fitted: list[float]) -> list[Residual]:
    return [point.residual([seconds]) for point, seconds in zip(points, fitted, strict=True)]


def test_quiet_rounds_have_no_remark() -> None:
    points = quiet(lambda i: (1.0, 1.01, 1.0, 0.99, 1.0))
    assert not [*remarks_of(points, residuals(points, [1.05] * 8))]


def test_noise_is_said() -> None:
    (said,) = remarks_of(quiet(lambda i: (1.0, 1.6, 1.0, 1.6) if i < 4 else (1.0, 1.0, 1.0, 1.0)), [])
    assert "4 of 8 points" in said
    assert "46% (point 0)" in said


def test_a_poor_fit_is_said_with_its_worst_point() -> None:
    points = quiet(lambda i: (1.0, 1.0, 1.0))
    (said,) = remarks_of(points, residuals(points, [1 + 0.1 * i for i in range(8)]))
    assert "5 of 8 points, most at point 7 (+70%)" in said
