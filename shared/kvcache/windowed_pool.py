"""The KV pages of a model of which some layers, or all, have a sliding window: two pools in the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.device_streams import GatherUnderWay
from shared.kvcache.page_mover import PageMover
from shared.kvcache.pools import TokenToKVPool


@dataclass(frozen=True)
class WindowedKVPool:
    """Pages of the layers that see all of a sequence, and window pages of the others (`WindowPages`).

    A transfer numbers layers group by group: those of `full`, then those of `window`. What it names is pages for the
    first, and window pages for the second. It never names layers of both at once.
    """

    full: TokenToKVPool
    """Without layers, and so without bytes, where every layer has a window."""
    window: TokenToKVPool
    has_window: tuple[bool, ...]
    """Of each layer of the model."""

    @property
    def page_size(self) -> int:
        """Tokens of a page, and of a window page."""
        return self.full.page_size

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.has_window)

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return self.window.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.window.dtype

    @property
    def mover(self) -> PageMover:
        """What copies pages."""
        return self.window.mover

    @property
    def nbytes(self) -> int:
        """Of both pools."""
        return self.full.nbytes + self.window.nbytes

    def layer_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V pages of a layer of the model, in the pool of its group."""
        has_window = self.has_window[layer]
        number = self.has_window[:layer].count(has_window)
        return (self.window if has_window else self.full).layer_kv(number)

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        """Bytes of `num_pages` pages of `num_layers` layers of one group, K and V."""
        return self.window.gather_nbytes(num_pages, num_layers)

    def gather(
        self,
        page_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int | GatherUnderWay:
        """As `TokenToKVPool.gather`, of layers of one group."""
        pool, first_layer = self._group(first_layer, num_layers)
        return pool.gather(page_ids, first_layer, num_layers, out, seed)

    def scatter(
        self,
        page_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """As `TokenToKVPool.scatter`, into layers of one group."""
        pool, first_layer = self._group(first_layer, num_layers)
        return pool.scatter(page_ids, first_layer, num_layers, src, seed)

    def _group(self, first_layer: int, num_layers: int) -> tuple[TokenToKVPool, int]:
        """The pool of a transfer's layers, and the number of the first one in it."""
        num_full = self.full.num_layers
        if first_layer >= num_full:
            return self.window, first_layer - num_full
        assert first_layer + num_layers <= num_full, "these layers are of both groups"
        return self.full, first_layer


AnyKVPool = TokenToKVPool | WindowedKVPool
"""The KV pages of a node."""
