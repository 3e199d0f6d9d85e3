"""A part of `make chaos ARGS=corruption`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.chaos.corruption import LATE, PATHS, Fault, fuzz
from tests.page_stores import PagesAround

torch.set_num_threads(1)


@pytest.mark.parametrize("path", PATHS)
def test_no_damaged_page_is_taken_for_a_whole_one(path: str) -> None:
    tally = fuzz(PATHS[path], 1600, seed=1)
    assert tally.wrong == []
    assert tally.refused.total() + tally.harmless.total() == 1600
    assert set(Fault) - set(LATE) <= tally.refused.keys()


class DigestIgnored(PagesAround):
    """Pages whose every digest is the same."""

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        super().gather(page_ids, first_layer, num_layers, out, seed)
        return 0

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        super().scatter(page_ids, first_layer, num_layers, src, seed)
        return 0


@pytest.mark.parametrize("path", PATHS)
def test_without_digests_damaged_pages_are_found_by_comparing_them(path: str) -> None:
    tally = fuzz(PATHS[path], 160, seed=1, wrap=DigestIgnored)
    assert len(tally.wrong) > 100
