"""The CPU time of following a grammar is bounded, in the probe of a compiled grammar and in each request."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import RequestError
from shared.grammar.compile_pool import NUM_PROBE_STEPS, probe
from shared.grammar.state import FREE_STEP_S, MAX_OWED_S, GrammarState, StepBudget
from tests.token_grammar import CostlyCompiled, CpuTime


@pytest.fixture
def cpu() -> CpuTime:
    return CpuTime()


def test_one_long_step_exhausts_a_budget_for_good() -> None:
    budget = StepBudget()
    budget.charge(MAX_OWED_S)
    assert not budget.is_exhausted
    budget.charge(0.001)
    assert budget.is_exhausted
    for _ in range(1000):
        budget.end_step()
    assert budget.is_exhausted


def test_steps_within_the_allowance_never_do() -> None:
    budget = StepBudget()
    for _ in range(10_000):
        budget.charge(FREE_STEP_S)
        budget.end_step()
    assert not budget.is_exhausted


def test_what_is_above_the_allowance_adds_up_and_is_paid_back() -> None:
    budget = StepBudget()
    for seconds in [FREE_STEP_S * 2] * 4 + [0.0] * 4 + [FREE_STEP_S * 2] * 4:
        budget.charge(seconds)
        budget.end_step()
    assert not budget.is_exhausted
    budget.charge(FREE_STEP_S * 2)
    assert budget.is_exhausted


def test_both_masks_and_tokens_are_charged(cpu: CpuTime) -> None:
    mask = np.zeros((1, 64), dtype=np.int32)
    by_mask = GrammarState(CostlyCompiled(cpu, mask_s=lambda _: 1.0), cpu_clock=cpu)
    by_mask.fill_mask(mask, 0)
    by_token = GrammarState(CostlyCompiled(cpu, accept_s=lambda _: 1.0), cpu_clock=cpu)
    assert by_token.accept(3)
    by_text = GrammarState(CostlyCompiled(cpu, forced_s=1.0), jump_forward=True, cpu_clock=cpu)
    by_text.forced_tokens()
    assert by_mask.is_too_slow and by_token.is_too_slow and by_text.is_too_slow
    for compiled in (CostlyCompiled(cpu), CostlyCompiled(cpu, forced_s=1.0)):
        state = GrammarState(compiled, cpu_clock=cpu)
        state.fill_mask(mask, 0)
        assert state.accept(3)
        state.forced_tokens()
        assert not state.is_too_slow


@pytest.mark.parametrize(
    "slow",
    [
        {"mask_s": lambda _: 1.0},
        {"accept_s": lambda _: 1.0},
        {"mask_s": lambda step: 1e-6 * 2**step},
        {"mask_s": lambda step: 1.0 * (step == 40)},
    ],
    ids=["mask", "token", "grows", "later"],
)
def test_a_slow_grammar_is_refused_before_anybody_follows_it(cpu: CpuTime, slow: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"^ebnf: .*too long") as caught:
        probe(CostlyCompiled(cpu, **slow), "ebnf", cpu)  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, "ebnf")
    assert cpu.seconds < 3  # it stops where it knows


def test_a_probe_goes_on_behind_the_end(cpu: CpuTime) -> None:
    compiled = CostlyCompiled(cpu, length=4, mask_s=lambda _: 0.001)
    probe(compiled, "regex", cpu)
    assert cpu.seconds == pytest.approx(0.001 * NUM_PROBE_STEPS)
