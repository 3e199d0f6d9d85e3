"""The two pools below the RadixCache: the rows of the page table, and the KV pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shared.cuda_streams import CudaStreams
from shared.device_streams import GatherUnderWay
from shared.host_memory import new_host_buffer
from shared.kvcache.page_mover import PageMover, TorchPageMover
from shared.protocol.messages import SCALE_NBYTES


class ReqToTokenPool:
    """The page table: one row of page ids per admitted request. A row's index is SGLang's req_pool_idx.

    Page `pages[row, i]` holds tokens [i * page_size, (i + 1) * page_size) of the request that owns the row. Rows are
    in host memory and belong to the scheduler thread. A launched forward works on a snapshot of them.
    """

    def __init__(self, num_rows: int, context_length: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_rows = num_rows
        self.pages = np.zeros((num_rows, -(-context_length // page_size)), dtype=np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows without an owner."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Take a row. None when every row is taken."""
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        """Return a row to the free list. Its pages must have another owner already."""
        assert row not in self._free, f"row {row} freed twice"
        self._free.append(row)

    def read(self, row: int, first_page: int, last_page: int) -> list[int]:
        """Return page ids [first_page, last_page) of a row, as Python ints."""
        ids: list[int] = self.pages[row, first_page:last_page].tolist()
        return ids

    def write(self, row: int, first_page: int, page_ids: Sequence[int]) -> None:
        """Write `page_ids` into a row from index `first_page` on."""
        self.pages[row, first_page : first_page + len(page_ids)] = page_ids


class TokenToKVPool:
    """The KV pages of all layers, in one allocation.

    `buffer_LSNHPD[layer, 0 | 1, page]` is one page of K | V with shape [num_kv_heads, page_size, head_dim]. A page is
    contiguous, and so is a range of heads within a page. Page 0 is never handed out, and padding is written there.
    `PageAllocator` decides which page may be written when. `mover` copies pages.

    Of a dtype of 8 bits a head of a page holds codes [page_size, head_dim], then their scales [page_size], float32:
    its shape is [page_size, head_dim + 4] (`shared.kernels.row_codes`).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        mover: PageMover | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.device = device
        self.dtype = dtype
        row_size = head_dim + SCALE_NBYTES if dtype.itemsize == 1 else head_dim
        shape = (num_layers, 2, num_pages, num_kv_heads, page_size, row_size)
        if device.type == "cpu":
            memory = new_host_buffer(math.prod(shape) * dtype.itemsize)
            self.buffer_LSNHPD = memory.view(dtype).view(shape)
        else:
            self.buffer_LSNHPD = torch.zeros(shape, dtype=dtype, device=device)
        self.page_nbytes = num_kv_heads * page_size * row_size * dtype.itemsize
        """Bytes of one page of one layer, of K or of V alone."""
        self.mover = mover or TorchPageMover(None if device.type == "cpu" else CudaStreams(device))
        self._pages_RPN = (
            self.buffer_LSNHPD.view(-1).view(torch.uint8).view(num_layers * 2, num_pages, self.page_nbytes)
        )
        """The buffer as bytes: [layers * 2, pages, page_nbytes]."""

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return self.buffer_LSNHPD.nbytes

    def layer_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V pages of one layer, each [num_pages, num_kv_heads, page_size, head_dim] or of codes."""
        return self.buffer_LSNHPD[layer, 0], self.buffer_LSNHPD[layer, 1]

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        """Bytes of `num_pages` pages of `num_layers` layers, K and V."""
        return 2 * num_layers * num_pages * self.page_nbytes

    def gather(
        self,
        page_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int | GatherUnderWay:
        """Copy pages into the uint8 tensor `out`, layer-major, K before V.

        With a `seed`, the digest is the `chunk_digest` of the pages, of slices of `page_nbytes`.
        """
        rows = range(2 * first_layer, 2 * (first_layer + num_layers))
        return self.mover.gather(self._pages_RPN, rows, page_ids, out, seed)

    def scatter(
        self,
        page_ids: Sequence[int],
        first_layer: int,
        num_layers: int,
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy `src` (uint8, laid out as by `gather`) into pages. The copy is done on return.

        With a `seed`, returns the digest of what was written.
        """
        rows = range(2 * first_layer, 2 * (first_layer + num_layers))
        return self.mover.scatter(self._pages_RPN, rows, page_ids, src, seed)
