"""A part of `make chaos ARGS=corruption`."""

from __future__ import annotations

import pytest
import torch

from tests.chaos.corruption import LATE, PATHS, Fault, fuzz

torch.set_num_threads(1)


@pytest.mark.parametrize("path", PATHS)
def test_no_damaged_page_is_taken_for_a_whole_one(path: str) -> None:
    tally = fuzz(PATHS[path], 1600, seed=1)
    assert tally.wrong == []
    assert tally.refused.total() + tally.harmless.total() == 1600
    assert set(Fault) - set(LATE) <= tally.refused.keys()
