"""A page store around another one, for those that do something more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.kvtransfer.endpoint import PageStore


class PagesAround:
    def __init__(self, pages: PageStore) -> None:
        self._pages = pages

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return self._pages.gather_nbytes(num_pages, num_layers)

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        return self._pages.gather(page_ids, first_layer, num_layers, out, seed)

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        return self._pages.scatter(page_ids, first_layer, num_layers, src, seed)
