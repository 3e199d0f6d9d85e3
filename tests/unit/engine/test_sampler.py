"""The batched sampler against its naive twin, row by row, and against the distribution it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.engine.model_worker_batch import snapshot
from shared.engine.sampler import _filter, sample
from shared.engine.sampling_inputs import SamplingInputs
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.unit.engine.naive_sampler import naive_probs, naive_sample, uniform

GOLDEN_UNIFORMS = [0.572181483697937, 0.5706194883051111, 0.6871007905211134, 0.4693558033836266]
V = 50
EOS = frozenset({3, 4})
PARAMS = {
    "greedy": {"temperature": 0.0},
    "top_k_1": {"top_k": 1},
    "plain": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k_beyond_vocab": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 8, "top_p": 0.7},
    "all": {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.05},
}


def sampling_inputs(params: list[SamplingParams], positions: list[int]) -> SamplingInputs[torch.Tensor]:
    """As a decode step of these requests carries them to the device."""
    ledger = make_ledger(4 * len(params) + 1, CacheOptions(page_size=16), len(params), 64)
    items = []
    for i, (p, position) in enumerate(zip(params, positions, strict=True)):
        req = Req(ReqKey("router", f"r{i}"), Work((1,), p), Timeline(Role.DECODE), 1000)
        req.num_sampled = position
        req.kv = ledger.admit(ledger.match_prefix([1], ""), "")
        items.append(schedule(req, 1, samples=True))
    batch = snapshot(ScheduleBatch(decodes=tuple(items)), ledger.rows, (), EOS)
    return batch.sampling.map(torch.from_numpy)


def params_of(name: str, **more: object) -> SamplingParams:
    return SamplingParams(**{**PARAMS[name], **more})  # type: ignore[arg-type]


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PARAMS)
def test_every_row_equals_the_naive_twin(name: str) -> None:
    params = [params_of(name, seed=seed) for seed in range(200)]
    positions = [seed % 7 for seed in range(200)]
    logits = random_logits(200, 1)
    expected = [
        naive_sample(logits[i].numpy(), p, position)
        for i, (p, position) in enumerate(zip(params, positions, strict=True))
    ]
    assert sample(logits.clone(), sampling_inputs(params, positions)).tolist() == expected


def test_a_mixed_batch_samples_each_row_as_if_alone() -> None:
    params = [params_of(name, seed=seed) for seed in range(8) for name in PARAMS]
    logits = random_logits(len(params), 2)
    positions = list(range(len(params)))
    together = sample(logits.clone(), sampling_inputs(params, positions)).tolist()
    alone = [
        sample(logits[i : i + 1].clone(), sampling_inputs([p], [i])).item() for i, p in enumerate(params)
    ]
    assert together == alone
    assert together == [naive_sample(logits[i].numpy(), p, i) for i, p in enumerate(params)]


@pytest.mark.parametrize("name", PARAMS)
def test_the_draws_have_the_promised_distribution(name: str) -> None:
    """4000 seeds on one row of logits: total variation within four times its expectation, nothing outside the set."""
    N = 4000
    logits = random_logits(1, 3)
    params = [params_of(name, seed=seed) for seed in range(N)]
    drawn = sample(logits.expand(N, V).clone(), sampling_inputs(params, [0] * N))
    probs_V = naive_probs(logits[0].numpy(), params[0])
    shares_V = np.bincount(drawn.numpy(), minlength=V) / N
    assert not shares_V[probs_V == 0].any()
    expected_distance = 0.5 * np.sqrt(2 * probs_V * (1 - probs_V) / (math.pi * N)).sum()
    assert 0.5 * np.abs(shares_V - probs_V).sum() <= 4 * expected_distance


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(1, V)
    assert sample(logits, sampling_inputs([params_of("greedy")], [0])).item() == 0


def test_ties_at_the_threshold_stay_in() -> None:
    """Which of two equally likely tokens is the k-th must not depend on a sort; so both may be drawn."""
    logits = torch.full((1, V), -10.0)
    logits[0, [5, 9, 12]] = 1.0
    params = [SamplingParams(top_k=2, seed=seed) for seed in range(300)]
    drawn = sample(logits.expand(300, V).clone(), sampling_inputs(params, [0] * 300))
    assert set(drawn.tolist()) == {5, 9, 12}


@pytest.mark.parametrize("name", PARAMS)
def test_masked_ids_are_never_drawn_before_min_new_tokens(name: str) -> None:
    logits = random_logits(1, 4)
    logits[0, [3, 20]] = 20.0  # an EOS and a stop token, by far the likeliest
    params = [params_of(name, seed=seed, min_new_tokens=2, stop_token_ids=(20,)) for seed in range(100)]
    for position, may_end in ((0, False), (1, False), (2, True)):
        drawn = sample(logits.expand(100, V).clone(), sampling_inputs(params, [position] * 100)).tolist()
        if may_end:
            assert set(drawn) & {3, 20}
        else:
            assert not set(drawn) & {3, 4, 20}
            assert drawn == [naive_sample(logits[0].numpy(), p, position, (3, 4, 20)) for p in params]


def test_ignore_eos_unmasks_eos_but_not_stop_ids() -> None:
    params = SamplingParams(min_new_tokens=2, stop_token_ids=(20,), ignore_eos=True)
    assert masked_ids(params, 0) == [20]
    kept = SamplingParams(min_new_tokens=2, stop_token_ids=(20,))
    assert masked_ids(kept, 1) == [20, 3, 4]
    assert masked_ids(kept, 2) == []


def masked_ids(params: SamplingParams, position: int) -> list[int]:
    masked = sampling_inputs([params], [position]).masked
    return [] if masked is None else masked.token_ids_N.tolist()


@pytest.mark.parametrize(
    ("params", "all_greedy", "needs_filter"),
    [
        ([{"temperature": 0.0}, {"top_k": 1}], True, False),
        ([{"temperature": 0.0, "top_p": 0.5}], True, False),
        ([{"temperature": 0.0}, {}], False, False),
        ([{}, {"top_p": 0.9}], False, True),
        ([{"top_k": 2}], False, True),
        ([{"min_p": 0.1}], False, True),
    ],
)
def test_work_that_no_row_needs_is_skipped(
    params: list[dict[str, float]], all_greedy: bool, needs_filter: bool
) -> None:
    inputs = sampling_inputs([SamplingParams(**p) for p in params], [0] * len(params))  # type: ignore[arg-type]
    assert (inputs.draws is None) is all_greedy
    assert (inputs.draws is not None and inputs.draws.needs_filter) is needs_filter


class TestUniform:
    def test_golden_values(self) -> None:
        """Frozen: another function would change the sampled text of every seed that a client has kept."""
        values = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**63 - 1, 1000)]
        assert values == GOLDEN_UNIFORMS

    @pytest.mark.parametrize("over", ["seeds", "positions"])
    def test_it_is_spread_evenly(self, over: str) -> None:
        """Kolmogorov-Smirnov over 10,000 neighbours, and no correlation between one and the next."""
        N = 10_000
        x = np.array([uniform(i, 0) if over == "seeds" else uniform(7, i) for i in range(N)])
        assert x.min() >= 0
        assert x.max() < 1
        ks = np.abs(np.sort(x) - (np.arange(N) + 0.5) / N).max()
        assert ks < 1.63 / math.sqrt(N)  # 1 % point
        assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 3 / math.sqrt(N)

    def test_neighbouring_seeds_at_neighbouring_positions_differ(self) -> None:
        """Choice i of n uses seed + i: its stream must not be the first choice's, shifted."""
        values = {uniform(seed, position) for seed in range(64) for position in range(64)}
        assert len(values) == 64 * 64


def test_a_neighbour_that_filters_changes_nothing_for_others() -> None:
    """A plain row of a large vocabulary keeps its whole tail, to the last bit, whoever it is batched with."""
    logits = torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0))
    logits[0] = 0.001 * logits[0]  # nearly uniform: float32 sums of so many probabilities fall short of one
    plain = params_of("plain", seed=0)
    for position in range(40):
        alone = sample(logits[:1].clone(), sampling_inputs([plain], [position]))
        beside = sample(logits.clone(), sampling_inputs([plain, params_of("top_k")], [position, position]))
        assert alone[0] == beside[0]
    probs = torch.softmax(logits, dim=-1)
    draws = sampling_inputs([plain, params_of("top_k")], [0, 0]).draws
    assert draws is not None
    kept = _filter(probs, draws)
    assert torch.equal(kept[0], probs[0])
    assert (kept[1] > 0).sum() == 5
