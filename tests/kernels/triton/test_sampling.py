"""Sampling and the adjustment of logits against their slow twins in `shared/engine`, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.engine.cuda.triton_ops import TritonTokens
from shared.engine.future_map import FutureMap
from shared.engine.penalties import penalize
from shared.engine.sampler import draw
from shared.engine.sampling_inputs import (
    BiasInputs,
    DrawInputs,
    MaskedInputs,
    PenaltyInputs,
    SamplingInputs,
    VocabMask,
    adjust_logits,
)
from shared.kernels.triton import adjust
from tests.device import device
from tests.kernels.cpu.test_sampling import KINDS, PARAMS, inputs_of, logits_of

pytestmark = pytest.mark.usefixtures("on_device")

SMALL = TritonTokens(block=256, few=32)
"""With small blocks a few hundred tokens take every branch of the search."""
Inputs = SamplingInputs[torch.Tensor]


def sample(logits_SV: torch.Tensor, inputs: Inputs, tokens: TritonTokens = SMALL) -> list[int]:
    """What is sampled, which the FutureMap holds afterwards too."""
    num_rows = len(logits_SV)
    rows_S, future_map = torch.randperm(2 * num_rows)[:num_rows], FutureMap(2 * num_rows, device())
    token_ids_S = tokens.draw(logits_SV.clone(), inputs, rows_S, future_map)
    assert torch.equal(future_map.last_token_R[rows_S], token_ids_S)
    return token_ids_S.tolist()


def expected(logits_SV: torch.Tensor, inputs: Inputs) -> list[int]:
    logits_SV = logits_SV.clone()
    adjust_logits(logits_SV, inputs)
    return draw(logits_SV, inputs.draws).tolist()


def case(kind: str, vocab_size: int) -> tuple[torch.Tensor, Inputs]:
    """A row of each of PARAMS."""
    torch.manual_seed(vocab_size)
    logits = logits_of(kind, len(PARAMS), vocab_size)
    return logits, SamplingInputs(draws=draws_of(list(PARAMS), vocab_size))


def draws_of(names: list[str], vocab_size: int) -> DrawInputs[torch.Tensor]:
    return inputs_of(names, vocab_size).map(lambda of_S: of_S.to(device()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_equals_the_twin(kind: str) -> None:
    logits, inputs = case(kind, 300)
    assert sample(logits, inputs) == expected(logits, inputs)


@pytest.mark.parametrize("vocab_size", [16, 9001], ids="V{}".format)
def test_the_size_of_blocks_changes_nothing(vocab_size: int) -> None:
    logits, inputs = case("normal", vocab_size)
    assert sample(logits, inputs, TritonTokens()) == expected(logits, inputs)


@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
def test_greedy_takes_the_first_of_the_likeliest(kind: str) -> None:
    logits, _ = case(kind, 300)
    assert sample(logits, SamplingInputs()) == logits.argmax(dim=-1).tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, inputs = case("normal", 200)
    together = sample(logits, inputs)
    assert inputs.draws is not None
    for i, token in list(enumerate(together))[::4]:
        alone = replace(inputs.draws.map(lambda of_S, i=i: of_S[i : i + 1]), needs_filter=True)
        assert sample(logits[i : i + 1], SamplingInputs(draws=alone)) == [token]


def test_a_uniform_at_an_edge_is_of_the_token_behind_it() -> None:
    draws = draws_of(["plain"] * 4, 4)
    draws.uniforms_S.copy_(torch.arange(4) / 4)
    assert sample(torch.zeros(4, 4), SamplingInputs(draws=draws)) == [0, 1, 2, 3]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_distribution(uniform: float) -> None:
    """What is masked or filtered out is never drawn."""
    logits, inputs = case("masked", 200)
    logits[:, 0] = logits[:, -1] = -torch.inf
    assert inputs.draws is not None
    inputs.draws.uniforms_S.fill_(uniform)
    tokens = sample(logits, inputs)
    assert torch.isfinite(logits[torch.arange(len(PARAMS)), torch.tensor(tokens)]).all()
    cold = list(PARAMS).index("cold")  # has tokens so unlikely that the kernel gives them no mass
    for i, (token, twin) in enumerate(zip(tokens, expected(logits, inputs), strict=True)):
        assert i == cold or token == twin, i


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity minus infinity
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_broken_logits_give_a_token_of_the_vocabulary(broken: float) -> None:
    inputs = SamplingInputs(draws=draws_of(["greedy", "plain", "all"], 100))
    tokens = sample(torch.full((3, 100), broken), inputs)
    assert all(0 <= token < 100 for token in tokens)


def pairs(
    generator: np.random.Generator, rows: list[int], num: int, V: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`num` tokens of each row."""
    ids = np.concatenate([generator.permutation(V)[:num] for _ in rows])
    return torch.tensor(rows).repeat_interleave(num), torch.from_numpy(ids).to(device())


def test_biases_masked_tokens_and_a_vocab_mask() -> None:
    """Of some rows each. A row whose allowed tokens are all taken out may draw any of them."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    S, V = 6, 300
    logits = logits_of("normal", S, V)
    words = generator.integers(-(1 << 31), 1 << 31, size=(3, -(-V // 32)), dtype=np.int64)
    words[2] = 0
    words[2, 1] = 0b110
    entries_N, token_ids_N = pairs(generator, [0, 3, 4], 150, V)
    masked_rows, masked_ids = pairs(generator, [1, 3], 40, V)
    inputs = SamplingInputs(
        draws=draws_of(["greedy", "plain", "top_p", "greedy", "plain", "greedy"], V),
        biases=BiasInputs(entries_N=entries_N, token_ids_N=token_ids_N, values_N=10 * torch.randn(450)),
        masked=MaskedInputs(
            entries_N=torch.cat((masked_rows, torch.tensor([5, 5]))),
            token_ids_N=torch.cat((masked_ids, torch.tensor([33, 34]))),
        ),
        vocab_mask=VocabMask(
            entries_G=torch.tensor([4, 0, 5]),
            allowed_GW=torch.from_numpy(words.astype(np.int32)).to(device()),
        ),
    )
    tokens = sample(logits, inputs)
    assert tokens == expected(logits, inputs)
    assert tokens[5] in (33, 34)
    without = replace(inputs, draws=None, masked=None, vocab_mask=None)
    assert sample(logits, without) == expected(logits, without)
    likeliest = logits[1].argmax()
    masked = MaskedInputs(entries_N=torch.tensor([1]), token_ids_N=likeliest[None])
    alone = sample(logits, SamplingInputs(masked=masked))
    assert alone == expected(logits, SamplingInputs(masked=masked)) and alone[1] != likeliest


def test_biases_in_several_rounds() -> None:
    """The kernel takes a list in parts, and a masked token gets no bias again."""
    logits, _ = case("normal", 50)
    biased, masked = (
        pairs(np.random.default_rng(0), [0, 2], 30, 50),
        pairs(np.random.default_rng(1), [2], 20, 50),
    )
    values = torch.randn(60)
    twin = logits.clone()
    twin[biased] += values
    twin[masked] = -torch.inf
    adjust.add_biases(logits, (*biased, values), masked, size=16)
    assert torch.equal(logits, twin)


@pytest.mark.parametrize("V", [1, 300, 2500], ids="V{}".format)
def test_penalties(V: int) -> None:
    """Rows that are not penalized keep their logits."""
    torch.manual_seed(V)
    logits, counts = 3 * torch.randn(5, V), torch.randint(-2, 3, (4, V), dtype=torch.int32).clamp_(min=0)
    is_known = (counts > 0) | (torch.rand(4, V) < 0.2)
    inputs = PenaltyInputs(
        entries_P=torch.tensor([4, 0, 2]),
        slots_P=torch.tensor([1, 3, 0]),
        frequency_P=torch.tensor([0.0, 0.7, -0.3]),
        presence_P=torch.tensor([0.5, 0.0, -1.0]),
        repetition_P=torch.tensor([1.3, 1.0, 0.7]),
        num_slots=4,
        anew=None,
    )
    twin = logits.clone()
    penalize(twin, inputs, counts, is_known)
    TritonTokens().penalize(logits, inputs, counts, is_known)
    assert torch.equal(logits, twin)
