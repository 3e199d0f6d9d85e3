"""What a forward does to a device that is not the host, shown on torch's `meta` device, which computes nothing.

An operation that mixes host and device raises there, and so does one that needs a value on the host.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.model_runner import ModelRunner
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import LogprobInputs, LogprobShare, VocabMask
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.pools import TokenToKVPool
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.backend_rig import LIMITS, NUM_ROWS, PAGE_SIZE, PAGES_A_ROW, batch_of
from tests.modelzoo import make_model
from tests.unit.engine.test_native_backend import sampling_of_everything

META = torch.device("meta")


class CopiesToDevice(TorchDispatchMode):
    """Counts the operations that read a tensor of the host and give one on the device."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == META:
            self.num_copies += any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args)
        return result


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    config = load_model_config(folder)
    pool = TokenToKVPool(
        num_pages=1 + NUM_ROWS * PAGES_A_ROW,
        page_size=PAGE_SIZE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=META,
    )
    decoder = Decoder.load(Checkpoint(folder), config, dtype=torch.float32, device=META)
    backend = TorchBackend(torch_kernels(META), decoder, pool, Progress(), LIMITS)
    return ModelRunner(backend, NUM_ROWS, META)


PROMPTS = {0: (0, [5, 6, 7]), 3: (2, [8, 9])}
DECODES = {1: 4, 2: 9}


@pytest.mark.parametrize(
    ("extends", "decodes"),
    [(PROMPTS, {}), ({}, DECODES), (PROMPTS, DECODES)],
    ids=["extend", "decode", "mixed"],
)
def test_the_inputs_of_a_forward_are_one_copy(
    runner: ModelRunner, extends: dict[int, tuple[int, list[int]]], decodes: dict[int, int]
) -> None:
    batch = replace(batch_of(extends, decodes), future_writes=((1, 40), (2, 41)))
    with CopiesToDevice() as copies:
        forwarded = runner.forward(batch)
        sampled = runner.sample(forwarded)
    assert sampled.token_ids_S.shape == (len(extends) + len(decodes),)
    assert sampled.token_ids_S.device == META
    assert copies.num_copies == 1


def test_whatever_a_request_can_ask_for_is_one_more_copy_and_stays_on_the_device(runner: ModelRunner) -> None:
    """Penalties with tokens to count, biases, tokens that may not come, a grammar, logprobs of prompt and output."""
    prompt = LogprobInputs(
        rows_N=np.array([0, 1], dtype=np.int64),
        targets_N=np.array([6, 7], dtype=np.int64),
        token_ids_NM=np.zeros((2, 1), dtype=np.int64),
        top_num=2,
        shares=(LogprobShare(0, 2, 2, 1),),
    )
    batch = replace(
        batch_of(PROMPTS, DECODES), sampling=replace(sampling_of_everything(0), input_logprobs=prompt)
    )
    mask = VocabMask(entries_G=np.array([1]), allowed_GW=np.full((1, 16), -1, dtype=np.int32))
    with CopiesToDevice() as copies:
        sampled = runner.sample(runner.forward(batch), mask)
    assert sampled.input_logprobs is not None and sampled.input_logprobs.chosen_N.device == META
    assert sampled.token_ids_S.device == META
    assert copies.num_copies == 2
