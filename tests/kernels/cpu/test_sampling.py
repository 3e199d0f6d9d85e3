"""Native sampling against its slow twin, token by token."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from shared.engine.sampler import draw
from shared.engine.sampling_inputs import DrawInputs
from shared.kernels.cpu.decoder import Sampling, sample
from shared.kernels.cpu.library import Team
from tests.patience import PATIENCE_S

PARAMS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.05, 0, 1.0, 0.0),
    "hot": (5.0, 0, 1.0, 0.0),
    "top_k": (1.0, 20, 1.0, 0.0),
    "top_k_1": (1.0, 1, 1.0, 0.0),
    "top_k_of_all_but_one": (3.0, -1, 1.0, 0.0),
    "top_k_beyond_vocabulary": (1.0, 1 << 30, 1.0, 0.0),
    "top_p": (1.0, 0, 0.9, 0.0),
    "top_p_tiny": (1.0, 0, 1e-6, 0.0),
    "top_p_hot": (5.0, 0, 0.95, 0.0),
    "min_p": (1.5, 0, 1.0, 0.1),
    "min_p_1": (1.0, 0, 1.0, 1.0),
    "top_k_top_p": (2.0, 50, 0.7, 0.0),
    "all": (0.8, 40, 0.95, 0.05),
}
KINDS = ("normal", "ties", "masked", "flat", "peaked")


def logits_of(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocab_size)
    match kind:
        case "ties":
            return logits.round()
        case "masked":
            return logits.masked_fill(torch.rand(rows, vocab_size) < 0.7, -torch.inf)
        case "flat":
            return logits * 1e-3
        case "peaked":
            return logits * 20
    return logits


def inputs_of(names: list[str], vocab_size: int) -> DrawInputs[torch.Tensor]:
    temperatures, top_ks, top_ps, min_ps = zip(*(PARAMS[name] for name in names), strict=True)
    return DrawInputs(
        temperatures_S=np.array(temperatures, dtype=np.float32),
        top_ks_S=np.array([vocab_size - 1 if k < 0 else k for k in top_ks], dtype=np.int64),
        top_ps_S=np.array(top_ps, dtype=np.float32),
        min_ps_S=np.array(min_ps, dtype=np.float32),
        uniforms_S=torch.rand(len(names), dtype=torch.float64, device="cpu").numpy(),
        needs_filter=True,
    ).map(torch.from_numpy)


def native(team: Team, logits: torch.Tensor, draws: DrawInputs[torch.Tensor] | None) -> list[int]:
    """What is sampled, which the FutureMap holds afterwards too."""
    sampling = Sampling()
    if draws is not None:
        tensors = draws.temperatures_S, draws.top_ks_S, draws.top_ps_S, draws.min_ps_S, draws.uniforms_S
        sampling = Sampling.of(*(tensor.numpy() for tensor in tensors))
    rows = torch.randperm(2 * len(logits))[: len(logits)]
    last_token = torch.full((2 * len(logits),), -1)
    tokens = sample(team, logits.clone(), sampling, rows, last_token)
    assert torch.equal(last_token[rows], tokens)
    assert (last_token == -1).sum() == len(logits)
    return tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [16, 50, 1000, 32003], ids="V{}".format)
def test_every_row_equals_the_twin(team: Team, vocab_size: int, kind: str) -> None:
    names = [name for name in PARAMS for _ in range(3 if vocab_size > 1000 else 20)]
    logits = logits_of(kind, len(names), vocab_size)
    inputs = inputs_of(names, vocab_size)
    assert native(team, logits, inputs) == draw(logits.clone(), inputs).tolist()


@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
@pytest.mark.parametrize("vocab_size", [1, 17, 128256], ids="V{}".format)
def test_greedy_takes_the_first_of_the_likeliest(team: Team, vocab_size: int, kind: str) -> None:
    logits = logits_of(kind, 3, vocab_size)
    assert native(team, logits, None) == logits.argmax(dim=-1).tolist()


def test_a_draw_follows_the_distribution(team: Team) -> None:
    """Evenly spaced uniforms give each kept token its share to within one of them."""
    count, logits = 4000, logits_of("normal", 1, 100)
    inputs = inputs_of(["all"] * count, 100)
    inputs.uniforms_S.numpy()[:] = (np.arange(count) + 0.5) / count
    found = np.bincount(native(team, logits.expand(count, 100), inputs), minlength=100)
    scaled = np.exp(logits[0].double().numpy() / 0.8)
    kept = scaled >= np.sort(scaled)[-40]
    order = np.argsort(-scaled)
    before = np.cumsum(scaled[order]) - scaled[order]
    kept[order] &= before < 0.95 * scaled[kept].sum()
    kept &= scaled >= 0.05 * scaled.max()
    expected = np.where(kept, scaled, 0) / scaled[kept].sum() * count
    assert np.abs(found - expected).max() <= 1.01


def test_a_uniform_at_an_edge_is_of_the_token_behind_it(team: Team) -> None:
    """The cumulative probability has to exceed it: all samplers agree, to the bit."""
    inputs = inputs_of(["plain"] * 4, 4)
    inputs.uniforms_S.numpy()[:] = np.arange(4) / 4
    assert native(team, torch.zeros(4, 4), inputs) == draw(torch.zeros(4, 4), inputs).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_distribution(team: Team, uniform: float) -> None:
    """What is masked or filtered out is never drawn."""
    names = list(PARAMS)
    logits = logits_of("masked", len(names), 1000)
    logits[:, 0] = logits[:, -1] = -torch.inf
    inputs = inputs_of(names, 1000)
    inputs.uniforms_S.numpy()[:] = uniform
    tokens = native(team, logits, inputs)
    assert torch.isfinite(logits[torch.arange(len(names)), torch.tensor(tokens)]).all()
    assert tokens == draw(logits.clone(), inputs).tolist()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_broken_logits_give_a_token_of_the_vocabulary(team: Team, broken: float) -> None:
    inputs = inputs_of(list(PARAMS), 100)
    tokens = native(team, torch.full((len(PARAMS), 100), broken), inputs)
    assert all(0 <= token < 100 for token in tokens)


@pytest.mark.usefixtures("native_kernels")
def test_want_of_memory_is_an_error_of_this_call_alone() -> None:
    """A thread of the team that does not catch what it throws would end the process."""
    script = """if True:
        import resource
        from pathlib import Path

        import numpy as np
        import torch

        from shared.kernels.cpu.library import Team, load_library
        from shared.kernels.cpu.decoder import Sampling, sample

        rows, vocab_size = 2, 10_000_000
        arrays = [np.full(rows, value, dtype) for value, dtype in
                  ((1.0, "float32"), (50, "int64"), (0.9, "float32"), (0.0, "float32"), (0.5, "float64"))]
        logits, ids, last = torch.zeros(rows, vocab_size), torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        logits[:, 7] = 50.0
        team = Team(load_library(), [-1, -1])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for more in (16 << 20, 1 << 30):
            resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
            try:
                print(sample(team, logits, Sampling.of(*arrays), ids, last).tolist())
            except MemoryError as error:
                print(error)
                logits[:] = 0.0
                logits[:, 7] = 50.0
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout.splitlines() == ["there is no memory for what this forward computes", "[7, 7]"], ended
