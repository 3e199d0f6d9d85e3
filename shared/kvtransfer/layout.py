"""What two nodes must agree on, what the transfer needs of their KV pages, and how a range of pages is cut into
chunks that fit a staging slot.

A chunk is some pages of some layers, layer-major, K before V. One page of all layers may be larger than a slot:
then a chunk holds a part of the layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from shared.device_streams import GatherUnderWay
from shared.errors import ConfigError, PeerMismatch
from shared.protocol.messages import KVLayout


class PageStore(Protocol):
    """Reads and writes whole pages; `kvcache.pools.TokenToKVPool` is one.

    Called on data threads, for pages that the transfer owns meanwhile.
    """

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        """Size of `num_pages` pages of `num_layers` layers, K and V."""
        ...

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int | GatherUnderWay:
        """Copy pages into the uint8 tensor `out`, layer-major, K before V, or begin to.

        The digest is of what was copied: the same that `scatter` returns for the same bytes and seed.
        """
        ...

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        """The inverse of `gather`; blocks until the pages are written. Returns the digest of what was written."""
        ...


def check_layout(ours: KVLayout, theirs: KVLayout, *, allow_mixed_numerics: bool) -> None:
    """Raise PeerMismatch, naming the first field that differs."""
    for field in KVLayout.__struct_fields__:
        if field == "numerics" and allow_mixed_numerics:
            continue
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            raise PeerMismatch(
                f"KV layouts differ in {field}: this node has {here!r}, the peer has {there!r}"
            )


def record_digest(
    input_ids: Sequence[int], output_ids: Sequence[int], token_ids: Sequence[int], kv_len: int
) -> int:
    """64 bits over what prefill and decode must both believe about a sequence when it changes hands."""
    digest = xxhash.xxh3_64()
    for ids in (input_ids, output_ids, token_ids, (kv_len,)):
        digest.update(array("q", (len(ids), *ids)).tobytes())
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages [first_page, first_page + num_pages) of a sequence, of layers [first_layer, first_layer + num_layers)."""

    first_page: int
    num_pages: int
    first_layer: int
    num_layers: int

    @property
    def units(self) -> int:
        """Pages times layers: what progress is counted in."""
        return self.num_pages * self.num_layers


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How pages of one group of layers are cut: at most `pages_per_chunk` pages of `layers_per_chunk` layers."""

    num_layers: int
    layers_per_chunk: int
    pages_per_chunk: int
    first_layer: int = 0

    @classmethod
    def fit(cls, *, num_layers: int, unit_nbytes: int, slot_nbytes: int, first_layer: int = 0) -> ChunkPlan:
        """Fill slots as well as possible; `unit_nbytes` is K and V of one page of one layer."""
        if num_layers == 0:
            return cls(0, 1, 1)
        layers = min(num_layers, slot_nbytes // unit_nbytes)
        if layers == 0:
            raise ConfigError(
                f"one page of one layer takes {unit_nbytes} bytes and does not fit a staging slot of {slot_nbytes}; "
                "raise --kv-slot-bytes or lower --page-size"
            )
        num_parts = -(-num_layers // layers)
        layers = -(-num_layers // num_parts)  # parts of equal size, so that no part is a small remainder
        return cls(num_layers, layers, slot_nbytes // (unit_nbytes * layers), first_layer)

    @classmethod
    def of_groups(cls, layout: KVLayout, *, unit_nbytes: int, slot_nbytes: int) -> tuple[ChunkPlan, ...]:
        """One for each group of layers, in their order."""
        num_windows = layout.num_window_layers
        num_full = layout.num_layers - num_windows
        full = cls.fit(num_layers=num_full, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes)
        if not num_windows:
            return (full,)
        return full, cls.fit(
            num_layers=num_windows, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes, first_layer=num_full
        )

    def cut(self, first_page: int, num_pages: int) -> Iterator[Chunk]:
        """Chunks that cover every (page, layer) of the range exactly once, in the order of the pages."""
        end_page = first_page + num_pages
        for page in range(first_page, end_page, self.pages_per_chunk):
            pages = min(self.pages_per_chunk, end_page - page)
            for layer in range(0, self.num_layers, self.layers_per_chunk):
                num_layers = min(self.layers_per_chunk, self.num_layers - layer)
                yield Chunk(page, pages, self.first_layer + layer, num_layers)
