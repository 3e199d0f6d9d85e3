"""Gather and scatter of KV pages in device memory, which also take the digest of what they copy (`page_digest`).

A program copies one slice: one page of K or of V of one layer.
It digests the words that it has loaded and is about to store. The digest of a chunk is the sum of its programs' parts
modulo 2^64. What differs from chunk to chunk (the seed, the page ids) is read from host memory, and the parts are
written there. So a chunk is one kernel. A copy before it and one behind it would each be another launch, and a change
of the GPU's engine: a GPU that two processes share in turns may turn to the other one there.

The slow twin is a copy by indexing with `chunk_digest`. The interfaces are Baton's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.cuda_streams import CudaStreams
from shared.device_streams import DeviceStreams, GatherUnderWay, StreamEvent

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_IDS_AT = 1
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK_LINES = 64
"""A program has 4 KiB in flight, 32 bytes a thread; some dozens of programs share an SM."""


@triton.jit
def _mix(z):
    """splitmix64 of int64; the shifts are logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _key_and_step(index_W):
    """The key of a half word in line 0, and what it grows by from line to line; int32."""
    random_W = _mix((index_W + 1) * _GOLDEN)
    return random_W.to(tl.int32), ((random_W >> 32) | 1).to(tl.int32)


@triton.jit(do_not_specialize=["first_row", "num_ids"])
def copy_pages_kernel(
    pages_ptr, slot_ptr, pinned_block_ptr, first_row, num_ids, row_words, page_words,
    SCATTER: tl.constexpr, BLOCK_LINES: tl.constexpr,
):  # fmt: skip
    """Copy slice `program` of a chunk, and write its part of the digest.

    `pages_ptr` is a pool in int64 words, `slot_ptr` a chunk [rows, ids, page_words]. `pinned_block_ptr` has the
    seed, the page ids, and room for a part of each program, int64.
    """
    place = tl.program_id(0).to(tl.int64)
    page = tl.load(pinned_block_ptr + 1 + place % num_ids)
    in_pool = pages_ptr + (first_row + place // num_ids) * row_words + page * page_words
    in_slot = slot_ptr + place * page_words
    if SCATTER:
        source, target = in_slot, in_pool
    else:
        source, target = in_pool, in_slot

    lane_W = tl.arange(0, 8).to(tl.int64)
    low_key_W, low_step_W = _key_and_step(2 * lane_W)
    high_key_W, high_step_W = _key_and_step(2 * lane_W + 1)
    products_LW = tl.zeros((BLOCK_LINES, 8), dtype=tl.int64)
    sums_LW = tl.zeros((BLOCK_LINES, 8), dtype=tl.int64)
    for first_line in range(0, tl.cdiv(page_words, 8), BLOCK_LINES):
        line_L = first_line + tl.arange(0, BLOCK_LINES)
        word_LW = line_L[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside_LW = word_LW < page_words
        x_LW = tl.load(source + word_LW, mask=inside_LW, other=0)
        tl.store(target + word_LW, x_LW, mask=inside_LW)
        low_LW = x_LW.to(tl.int32) + (low_key_W[None, :] + line_L[:, None] * low_step_W[None, :])
        high_LW = (x_LW >> 32).to(tl.int32) + (high_key_W[None, :] + line_L[:, None] * high_step_W[None, :])
        is_line_L = line_L * 8 < page_words  # the words that fill up the last line count, with zeros
        products_LW += tl.where(is_line_L[:, None], low_LW.to(tl.int64) * high_LW.to(tl.int64), 0)
        sums_LW += x_LW
    product_W = tl.sum(products_LW, axis=0)
    sum_W = tl.sum(sums_LW, axis=0)
    is_neighbour_WW = (lane_W[:, None] ^ 1) == lane_W[None, :]
    lanes_W = product_W + tl.sum(tl.where(is_neighbour_WW, sum_W[None, :], 0), axis=1)
    seed = tl.load(pinned_block_ptr)
    mixed_W = _mix(lanes_W + seed + (place * 8 + lane_W + 1) * _GOLDEN)
    tl.store(pinned_block_ptr + 1 + num_ids + place, tl.sum(mixed_W, axis=0))


def copy_pages(
    pages_RPN: torch.Tensor,
    rows: range,
    slot: torch.Tensor,
    block: torch.Tensor,
    *,
    scatter: bool,
) -> None:
    """Copy pages into `slot`, or `slot` into pages, on the current stream.

    `block`, int64, has the seed, the page ids, and room for the part that each slice has in the digest. It may be
    pinned host memory. Pages are contiguous multiples of 8 bytes. Page ids are not checked.
    """
    num_ids = (len(block) - _IDS_AT) // (1 + len(rows))
    words_RPW = pages_RPN.view(torch.int64)
    assert words_RPW.stride(1) == words_RPW.shape[2]
    assert slot.is_contiguous() and slot.nbytes == len(rows) * num_ids * pages_RPN.shape[2]
    if not len(rows) * num_ids:
        return
    copy_pages_kernel[(len(rows) * num_ids,)](
        words_RPW, slot.view(-1).view(torch.int64), block, rows.start, num_ids,
        words_RPW.stride(0), words_RPW.stride(1),
        SCATTER=scatter, BLOCK_LINES=BLOCK_LINES, **OPTIONS,
    )  # fmt: skip


class TritonPageMover:
    """A PageMover for pages in the memory of `device`, in multiples of 8 bytes.

    The other tensor of a copy is on the same device, or in host memory, pinned if the copy is to be fast. A copy runs
    on the stream of the calling thread, which waits for it, also when it raises half-way: then its pages and its slot
    go to others. Only a gather within the device returns while it is under way.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams | None = None,
        kernel: Callable[..., None] = copy_pages,
    ) -> None:
        """Take `streams` where CUDA's are not meant, and a `kernel` that stands for `copy_pages`."""
        self._device = device
        self._streams = streams or (CudaStreams(device) if device.type == "cuda" else None)
        self._kernel = kernel
        self._idle: list[_Lane] = []
        """As many as copies have run at the same time. Threads only append and pop."""

    def gather(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        out: torch.Tensor,
        seed: int | None = None,
    ) -> int | GatherUnderWay:
        """Copy pages into the contiguous `out`. The digest is of the words that were read."""
        lane = self._take_lane()
        try:
            lane.start(pages_RPN, rows, page_ids, out, seed, scatter=False)
        except BaseException:
            self._idle.append(lane)
            raise
        gather = _Gather(lane, self._idle)
        # Through host memory a second one would take device memory of its own, and the way there is slower anyway.
        return gather if out.device == pages_RPN.device else gather.wait()

    def scatter(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        """Copy the contiguous `src` into pages. The digest is of the words that were written."""
        lane = self._take_lane()
        try:
            lane.start(pages_RPN, rows, page_ids, src, seed, scatter=True)
            return lane.wait()
        finally:
            self._idle.append(lane)

    def _take_lane(self) -> _Lane:
        try:
            return self._idle.pop()
        except IndexError:
            return _Lane(self._device, self._streams, self._kernel)


@dataclass(frozen=True, slots=True)
class _Gather:
    lane: _Lane
    idle: list[_Lane]

    def wait(self) -> int:
        try:
            return self.lane.wait()
        finally:
            self.idle.append(self.lane)


class _Lane:
    """What one copy at a time needs: pinned memory for ids and digest, and device memory for a slot of the host."""

    def __init__(
        self, device: torch.device, streams: DeviceStreams | None, kernel: Callable[..., None]
    ) -> None:
        self._device = device
        self._streams = streams
        self._kernel = kernel
        self._block = self._host(0)
        self._staging = self._on_device(0)
        self._parts = self._block
        """What the copy under way adds up to its digest."""
        self._done: StreamEvent | None = None

    def start(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        slot: torch.Tensor,
        seed: int | None,
        *,
        scatter: bool,
    ) -> None:
        if page_ids and not 0 <= min(page_ids) <= max(page_ids) < pages_RPN.shape[1]:
            raise IndexError(f"of pages {page_ids} one is not of these {pages_RPN.shape[1]}")
        first_part = _IDS_AT + len(page_ids)
        block = self._room_for(first_part + len(rows) * len(page_ids))
        block.numpy()[:first_part] = (_signed(seed or 0), *page_ids)
        self._parts = block[first_part if seed is not None else len(block) :]
        try:
            staged = slot if slot.device == pages_RPN.device else self._stage(slot.nbytes)
            if scatter and staged is not slot:
                staged.copy_(slot.view(-1), non_blocking=True)
            self._kernel(pages_RPN, rows, staged, block, scatter=scatter)
            if not scatter and staged is not slot:
                slot.view(-1).copy_(staged, non_blocking=True)
        except BaseException:
            if self._streams is not None:
                self._streams.current().synchronize()
            raise
        self._done = None if self._streams is None else self._streams.current().record()

    def wait(self) -> int:
        if self._done is not None:
            self._done.synchronize()
        return int(self._parts.numpy().sum()) % (1 << 64)

    def _room_for(self, num_words: int) -> torch.Tensor:
        if num_words > len(self._block):
            self._block = self._host(2 * num_words)
        return self._block[:num_words]

    def _stage(self, nbytes: int) -> torch.Tensor:
        """Device memory between the pages and a slot in host memory."""
        if nbytes > len(self._staging):
            self._staging = self._on_device(nbytes)
        return self._staging[:nbytes]

    def _host(self, num_words: int) -> torch.Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_words, dtype=torch.int64, device="cpu", pin_memory=is_pinned)

    def _on_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    return seed - (1 << 64) if seed >> 63 else seed
