"""Where tests that can run on a CPU and on a GPU run: `make test-gpu` says so in the environment."""

from __future__ import annotations

import os

import torch

VARIABLE = "BATON_TEST_DEVICE"


def device() -> torch.device:
    """The GPU of `make test-gpu`; without it the CPU. Both have their index: `PretendGpu` knows the CPU by that."""
    where = torch.device(os.environ.get(VARIABLE, "cpu"))
    return torch.device(where.type, where.index or 0)
