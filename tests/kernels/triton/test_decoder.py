"""The whole forward and sampling by Triton kernels beside torch's operations, and what `--exact` promises.

In float32: the interpreter's products of bfloat16 are wrong. `make test-gpu` has more of exactness.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from shared.engine.cuda.triton_kernels import make_triton_kernels
from shared.engine.cuda.triton_ops import Linear
from shared.engine.future_map import FutureMap
from shared.engine.model_runner import Forwarded
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kernels.triton.linear import ExactLinear
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.backend_rig import LIMITS, NUM_ROWS, PAGE_SIZE, PAGES_A_ROW, Rig, kv_pool
from tests.device import device
from tests.kernels.cpu.test_sampling import inputs_of
from tests.modelzoo import make_model, random_prompt

EXACT = ExactLinear(num_processors=3)
NUM_PAGES, WINDOW = 1 + NUM_ROWS * PAGES_A_ROW, 9
SIZES = {"num_hidden_layers": 2, "vocab_size": 300, "head_dim": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {"head_dim": 16},  # the heads have the width of the model together
    "mistral": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW},
    "gptoss": {"sliding_window": WINDOW},
}


def decoder_of(folder: Path, architecture: str) -> Decoder:
    make_model(folder, architecture, **SIZES | OTHERS.get(architecture, {}))
    config = load_model_config(folder)
    return Decoder.load(Checkpoint(folder), config, dtype=torch.float32, device=device())


class OverTwoPools(TorchBackend):
    """Layers with windows have pages in the reverse order, and none before their window."""

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        table_BP = batch.page_table_BP
        first_B = (batch.starts_B + 1 - WINDOW).clip(0) // PAGE_SIZE
        is_seen_BP = np.arange(table_BP.shape[1]) >= first_B[:, None]
        windows_BP = np.where(is_seen_BP, NUM_PAGES - table_BP, 0).astype(np.int32)
        return super().forward(replace(batch, window_table_BP=windows_BP), future_map)


def rig_of(decoder: Decoder, product: Linear | None) -> tuple[Rig, AnyKVPool]:
    """By Triton's kernels with these products, over a pool for each group of layers, or by torch."""

    def pool_of(num_layers: int) -> TokenToKVPool:
        of_rows = NUM_PAGES, PAGE_SIZE, torch.float32, device()
        return kv_pool(decoder.config, *of_rows, num_layers=num_layers)

    pool: AnyKVPool = pool_of(len(windows := decoder.config.windows))
    kernels, make_backend, progress = torch_kernels(device()), TorchBackend, Progress()
    if product is not None:
        if num_windows := len(windows) - windows.count(None):
            has_window = tuple(window is not None for window in windows)
            pool = WindowedKVPool(pool_of(windows.count(None)), pool_of(num_windows), has_window)
            pool.window.buffer_LSNHPD[:, :, 0] = torch.nan
            make_backend = OverTwoPools
        kernels = make_triton_kernels(decoder.config, pool.dtype, pool, product, "interpreted")
    rig = Rig(make_backend(kernels, decoder, pool, progress, LIMITS), progress)
    rig.future_map = FutureMap(NUM_ROWS, device())
    return rig, pool


def generated(
    rig: Rig, prompts: list[list[int]], num_steps: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of each row and logits, by step: the first prompt in two chunks, then all of them together."""
    draws = inputs_of(["greedy", "all", "plain"], 300)
    draws.uniforms_S.copy_(torch.tensor([0.1, 0.4, 0.7]))
    inputs = SamplingInputs(draws=draws.map(lambda x: x.to(device())))
    rows, tokens, logits = torch.arange(len(prompts), device=device()), [], []
    rig.extend({0: (0, prompts[0][:9])})
    extends = {i: (9 if i == 0 else 0, ids[9 if i == 0 else 0 :]) for i, ids in enumerate(prompts)}
    for step in range(num_steps):
        decodes = {i: len(ids) + step - 1 for i, ids in enumerate(prompts)} if step else {}
        logits.append(rig.forward({} if step else extends, decodes))
        drawn = rig.backend.draw(logits[-1].clone(), inputs, rows, rig.future_map)
        tokens.append(drawn.tolist())
    return tokens, logits


@pytest.mark.parametrize(
    ("architecture", "product"),
    [
        ("qwen2", EXACT),
        ("qwen3", linear),
        ("glm4", EXACT),
        ("olmoe", linear),
        ("mistral", linear),
        ("gptoss", linear),
        ("gemma3", EXACT),
    ],
    ids=[
        "qwen2-exact",
        "qwen3-cublas",
        "glm4-exact",
        "olmoe-cublas",
        "mistral-cublas",
        "gpt-oss-cublas",
        "gemma3-exact",
    ],
)
def test_tokens_are_those_of_torch(architecture: str, product: Linear, tmp_path: Path) -> None:
    """Heads in groups; Qwen2 has biases, Qwen3 QK-norm, GLM-4 norms behind attention, OLMoE experts, Mistral windows,
    gpt-oss sinks. Gemma has windows too, two rotary embeddings, norms with weights in float32, and GELU.

    One row is greedy, and the others draw.
    """
    decoder = decoder_of(tmp_path, architecture)
    prompts = [random_prompt(length, seed=length, vocab_size=300) for length in (21, 5, 12)]
    expected_tokens, expected_logits = generated(rig_of(decoder, None)[0], prompts, 2)
    rig, _ = rig_of(decoder, product)
    assert rig.backend.is_exact == (product is EXACT), "what the self test of a node that starts holds it to"
    tokens, logits = generated(rig, prompts, 2)
    assert tokens == expected_tokens
    for found, expected in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert rig.progress.count == 3 * 2, "every layer of every forward is counted"


def test_decode_steps_have_the_bits_of_an_extend(tmp_path: Path) -> None:
    """KV and logits, alone and beside other sequences."""
    decoder, ids = decoder_of(tmp_path, "qwen3"), random_prompt(40, seed=3, vocab_size=300)
    whole, whole_pool = rig_of(decoder, EXACT)
    expected = whole.extend({0: (0, ids)})
    stepped, stepped_pool = rig_of(decoder, EXACT)
    stepped.extend({0: (0, ids[:35])})
    stepped.extend({1: (0, ids[:13]), 2: (0, ids[:20])})
    for start in range(35, 40):
        others = {1: 13, 2: 20} if start % 2 else {}
        for row, at in ({0: start} | others).items():
            stepped.future_map.last_token_R[row] = ids[at]
        logits = stepped.forward({}, others | {0: start})[-1]
    assert torch.equal(logits, expected[0])
    # Those of row 0: `batch_of` lays them out backwards.
    pages = torch.arange(PAGES_A_ROW, PAGES_A_ROW - 10, -1, device=device())
    whole_kv, stepped_kv = (pool.buffer_LSNHPD[:, :, pages] for pool in (whole_pool, stepped_pool))
    assert torch.equal(whole_kv, stepped_kv)
    assert whole_kv.any()
