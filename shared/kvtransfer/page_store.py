"""What the transfer needs of the KV pages; `kvcache.pools.TokenToKVPool` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PageStore(Protocol):
    """Reads and writes whole pages. Called on data threads, for pages that the transfer owns meanwhile."""

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        """Size of `num_pages` pages of `num_layers` layers, K and V."""
        ...

    def gather(self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor) -> None:
        """Copy pages into the uint8 tensor `out`, layer-major, K before V; blocks until they are there."""
        ...

    def scatter(self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor) -> None:
        """The inverse of `gather`; blocks until the pages are written."""
        ...
