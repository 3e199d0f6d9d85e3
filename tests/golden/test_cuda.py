"""The same path on a GPU: torch's own operations, the CUDA forward stream, transfers through pinned host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.golden.references import Zoo
from tests.golden.serving import Client, node_config, split
from tests.modelzoo import random_prompt, reference_greedy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: the CUDA path is not tested"),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("retract_every", [0, 3])
def test_split_on_a_gpu_equals_reference(zoo: Zoo, llama: Path, overlap: bool, retract_every: int) -> None:
    config = node_config(llama, overlap=overlap, retract_every=retract_every)
    config = replace(config, model=replace(config.model, device="cuda"))
    prompts = [random_prompt(40 + 7 * i, seed=i) for i in range(8)]
    with split(config) as cluster:
        got = Client(cluster).tokens(prompts)
    assert got == [reference_greedy(llama, ids, 32) for ids in prompts]
