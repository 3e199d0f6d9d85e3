"""How near torch's backend comes to what ADR 27 demands of the native kernels, which a decode step there is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backend_rig import rig
from tests.modelzoo import make_model, random_prompt

IDS = random_prompt(70, seed=3)
NUM_DECODED = 10


def logits_of(folder: Path, dtype: torch.dtype, num_extended: int) -> torch.Tensor:
    """Of the last token: `num_extended` in one extend, the others by decode steps."""
    with rig(folder, "torch", dtype) as path:
        logits = path.extend({0: (0, IDS[:num_extended])})
        for start in range(num_extended, len(IDS)):
            path.future_map.last_token_R[0] = IDS[start]
            logits = path.forward({}, {0: start})
        return logits[0]


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_decode_steps_come_near_an_extend(tmp_path: Path, dtype: torch.dtype, apart: float) -> None:
    name = str(dtype).removeprefix("torch.")
    folder = make_model(tmp_path, "qwen3", dtype=name, hidden_size=256, intermediate_size=512)
    extended = logits_of(folder, dtype, len(IDS))
    assert torch.equal(logits_of(folder, dtype, len(IDS)), extended), "the same forward gives the same bits"
    decoded = logits_of(folder, dtype, len(IDS) - NUM_DECODED)
    assert (decoded - extended).abs().max() < apart * extended.abs().max()
