"""Paged attention for extends and decode steps in one kernel.

With `exact` the output of a token has the same bits from a decode step, a prefill or a chunk of one, beside any
others:
- A tile has BLOCK_M rows always, and a row's sums have nothing of other rows in them.
- The keys of a split are taken TILE at a time from its first one. Keys that a row does not see have weight zero, and
  TILE keys of which a row sees none multiply its sums by one.
- A split starts from an empty state. `_add_split` adds its state to that of the splits before it, both in a program
  that has all splits of a tile and in the merge of a cut one. No sum of two products is left to the compiler: each is
  an `fma` as written.
- A sum may be -0 in one way and +0 in another one. The output has +0.
- With a window, splits and TILE keys are counted from the first key of a sequence too. A tile of rows begins with the
  ones that have the first key of any of its rows' windows.
On a GPU this needs matrix instructions in which the result of a row does not depend on its place in the tile.

Splits in parallel and their merge are FlashDecoding's (https://pytorch.org/blog/flash-decoding/), the online softmax
is FlashAttention 2's (arXiv 2307.08691), and one kernel for prefill and decode whose rows are the query heads of a
KV head is vLLM's idea (https://github.com/vllm-project/vllm/pull/16828). `attention_work` describes the splits and
the list of work that takes the place of a grid over the batch.

The slow twins are `extend_attention` and `decode_attention` of `shared.kernels.reference`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from shared.errors import ConfigError
from shared.kernels.triton import attention_work as work
from shared.kernels.triton.attention_constants import (
    MERGE_OPTIONS,
    WARPS_A_PROCESSOR,
    attention_constants,
    attention_options,
    merge_constants,
    processors,
)

HEADER_WORDS: tl.constexpr = tl.constexpr(work.HEADER_WORDS)
ITEM_WORDS: tl.constexpr = tl.constexpr(work.ITEM_WORDS)
MERGE_WORDS: tl.constexpr = tl.constexpr(work.MERGE_WORDS)
PAGE_TABLE_WORD: tl.constexpr = tl.constexpr(int(work.Header.PAGE_TABLE))
TABLE_STRIDE_WORD: tl.constexpr = tl.constexpr(int(work.Header.TABLE_STRIDE))
WORK_WORD: tl.constexpr = tl.constexpr(int(work.Header.WORK))
WINDOW_TABLE_WORD: tl.constexpr = tl.constexpr(int(work.Header.WINDOW_TABLE))

WORKSPACE_NBYTES = 128 << 20
"""The default bound on the states of cut tiles. Tiles that find no room are not cut, which costs time alone."""


@triton.jit
def _exponent(reference):
    """The reference of a state, or 0 where the state is empty, so that no difference is NaN."""
    return tl.where(reference == float("-inf"), 0.0, reference)


@triton.jit
def _add_split(acc, total, reference, split_acc, split_total, split_reference):
    """The state of the keys so far and of those of the next split. Every way of a row to its output comes here."""
    joint = tl.maximum(reference, split_reference)
    before = tl.exp2(reference - _exponent(joint))
    now = tl.exp2(split_reference - _exponent(joint))
    acc = tl.fma(split_acc, now[:, None], acc * before[:, None])
    return acc, tl.fma(split_total, now, total * before), joint


@triton.jit
def _add_sink(acc, total, reference, sinks_ptr, item_ptr, row, is_row, kv_head, GROUP: tl.constexpr):
    """The state beside the sinks of the rows' heads, which have a share of the weights and no values."""
    head = kv_head * GROUP + (tl.load(item_ptr + 3) + row) % GROUP
    sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
    joint = tl.maximum(reference, sink)
    before = tl.exp2(reference - joint)
    return acc * before[:, None], tl.fma(total, before, tl.exp2(sink - joint))


@triton.jit
def _output(acc, total):
    """The weighted mean, with +0 for zeros. Rows that are not stored may be empty."""
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    return acc * inverse[:, None] + 0.0


@triton.jit
def _store_state(
    workspace_ptr, totals_ptr, first, row, d, acc, total, reference, is_row, HEAD_DIM: tl.constexpr
):
    """Keep the state of each row at `first + row` of the workspace. `first` is a scalar, so addresses stay short."""
    at = row[:, None] * HEAD_DIM + d[None, :]
    mask = is_row[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(workspace_ptr + first * HEAD_DIM + at, acc, mask=mask)
    tl.store(totals_ptr + first * 2 + row * 2, total, mask=is_row)
    tl.store(totals_ptr + first * 2 + row * 2 + 1, reference, mask=is_row)


@triton.jit
def _load_state(workspace_ptr, totals_ptr, first, row, d, is_row, HEAD_DIM: tl.constexpr):
    """What `_store_state` kept; an empty state for other rows."""
    at = row[:, None] * HEAD_DIM + d[None, :]
    mask = is_row[:, None] & (d[None, :] < HEAD_DIM)
    acc = tl.load(workspace_ptr + first * HEAD_DIM + at, mask=mask, other=0.0)
    total = tl.load(totals_ptr + first * 2 + row * 2, mask=is_row, other=0.0)
    reference = tl.load(totals_ptr + first * 2 + row * 2 + 1, mask=is_row, other=float("-inf"))
    return acc, total, reference


@triton.jit
def _rows(item_ptr, row, GROUP: tl.constexpr, token_stride, HEAD_DIM: tl.constexpr):
    """Of an item or a merge: which rows it has, its first token (int64), and where the rows are behind that token."""
    first_row = tl.load(item_ptr + 3)
    grouped_row = first_row % GROUP + row
    at = grouped_row // GROUP * token_stride + grouped_row % GROUP * HEAD_DIM
    return row < tl.load(item_ptr + 4), (tl.load(item_ptr + 1) + first_row // GROUP).to(tl.int64), at


@triton.jit
def _attend(
    q, position, k_ptr, v_ptr, words_ptr, pages_at, kv_head, first_key, until_key, low_key, end_key, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, HAS_CODES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The state of the rows over the keys from `first_key` to before `until_key`.

    No row sees a key before `low_key`, or from `end_key` on. Such keys may be NaN.

    Codes of 8 bits, whose bytes are loaded, become numbers of q's type, which has them exactly. The scales of K
    multiply scores, and those of V weights. They lie behind the codes of a head's page.

    The pages of TILE keys are looked up while the ones before are computed. A load whose address waits for another
    load of the same turn would not be started ahead.
    """
    HEAD_ELEMENTS: tl.constexpr = PAGE_SIZE * (HEAD_DIM + 4 * HAS_CODES)
    # Scales of V are about 0.01: with a weight they would be too small for the exponents of float16.
    V_FACTOR: tl.constexpr = 1024.0 if q.dtype == tl.float16 else 1.0
    tile = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    in_head = d[None, :] < HEAD_DIM
    acc = tl.zeros((q.shape[0], BLOCK_D), dtype=tl.float32)
    total = tl.zeros((q.shape[0],), dtype=tl.float32)
    reference = tl.full((q.shape[0],), float("-inf"), dtype=tl.float32)
    codes_k_ptr, codes_v_ptr = k_ptr, v_ptr
    if HAS_CODES:
        codes_k_ptr, codes_v_ptr = k_ptr.to(tl.pointer_type(tl.int8)), v_ptr.to(tl.pointer_type(tl.int8))
    if WINDOW:
        first_key += tl.maximum(low_key - first_key, 0) // TILE * TILE
    key = first_key + tile
    page = tl.load(words_ptr + pages_at + tl.minimum(key, end_key - 1) // PAGE_SIZE)
    for first in range(first_key, until_key, TILE):
        key = first + tile
        # What lies behind the last key, or before the window, may be NaN, and 0 * NaN is NaN.
        is_key = key < end_key
        if WINDOW:
            is_key = is_key & (key >= low_key)
        head = page.to(tl.int64) * NUM_KV_HEADS + kv_head
        at = (head * HEAD_ELEMENTS + key % PAGE_SIZE * HEAD_DIM)[:, None] + d[None, :]
        k = tl.load(codes_k_ptr + at, mask=in_head, other=0)
        v = tl.load(codes_v_ptr + at, mask=is_key[:, None] & in_head, other=0)
        if HAS_CODES:
            k, v = k.to(k_ptr.dtype.element_ty, bitcast=True), v.to(v_ptr.dtype.element_ty, bitcast=True)
            scale_at = head * (HEAD_ELEMENTS // 4) + PAGE_SIZE * HEAD_DIM // 4 + key % PAGE_SIZE
            k_scale = tl.load(k_ptr.to(tl.pointer_type(tl.float32)) + scale_at)
            v_scale = tl.load(v_ptr.to(tl.pointer_type(tl.float32)) + scale_at, mask=is_key, other=0.0)
        page = tl.load(words_ptr + pages_at + tl.minimum(key + TILE, end_key - 1) // PAGE_SIZE)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if HAS_CODES:
            scores *= k_scale[None, :]
        if WINDOW:  # keys behind the row's own are at a large unsigned distance
            is_seen = (position[:, None] - key[None, :]).to(tl.uint32) < WINDOW
        else:
            is_seen = key[None, :] <= position[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        joint = tl.maximum(reference, tl.max(scores, 1) * scale)
        exponent = _exponent(joint)
        shrink = tl.exp2(reference - exponent)
        weights = tl.exp2(tl.fma(scores, scale, -exponent[:, None]))
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        if HAS_CODES:
            weights *= (v_scale * V_FACTOR)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        reference = joint
    if HAS_CODES:
        acc *= 1.0 / V_FACTOR
    return acc, total, reference


@triton.jit
def _item(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, workspace_ptr, totals_ptr, words_ptr, item_ptr, kv_head, own_first,
    q_stride, workspace_rows, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_CODES: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The output of a whole tile of BLOCK_M rows, or the state of a cut one."""
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_head = d[None, :] < HEAD_DIM
    pages_at = tl.load(words_ptr + (WINDOW_TABLE_WORD if WINDOW else PAGE_TABLE_WORD))
    pages_at += tl.load(item_ptr) * tl.load(words_ptr + TABLE_STRIDE_WORD)
    first_key = tl.load(item_ptr + 5)
    end_key = tl.load(item_ptr + 6)
    is_row, first_token, row_at = _rows(item_ptr, row, GROUP, q_stride, HEAD_DIM)
    position = tl.where(is_row, tl.load(item_ptr + 2) + (tl.load(item_ptr + 3) + row) // GROUP, -1)
    tile_q_ptr = q_ptr + first_token * q_stride + kv_head * (GROUP * HEAD_DIM)
    q = tl.load(tile_q_ptr + row_at[:, None] + d[None, :], mask=is_row[:, None] & in_head, other=0.0)
    step = SPLIT if SPLIT else end_key - first_key
    low_key = 0
    if WINDOW:
        low_key = tl.maximum(tl.load(item_ptr + 2) + tl.load(item_ptr + 3) // GROUP - (WINDOW - 1), 0)
        # A cut tile's item is one split, whose state is stored although it may be empty.
        first_key += tl.minimum(tl.maximum(low_key - first_key, 0), end_key - 1 - first_key) // step * step
    for split in range(first_key, end_key, step):
        until_key = tl.minimum(split + step, end_key)
        acc, total, reference = _attend(
            q, position, k_ptr, v_ptr, words_ptr, pages_at, kv_head, split, until_key, low_key, end_key, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, TILE, HAS_CODES, WINDOW,
        )  # fmt: skip
        # Rows are loaded and computed again. Kept during the loop they would take the registers that acc needs.
        # The minimum is 0, which the compiler does not know.
        stored_row = row + tl.minimum(split, 0)
        is_stored, first_token, row_at = _rows(
            item_ptr, stored_row, GROUP, NUM_KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM
        )
        workspace_row = tl.load(item_ptr + 7)
        state_first = own_first
        if workspace_row >= 0:
            state_first = kv_head.to(tl.int64) * workspace_rows + workspace_row
        elif SPLIT:
            tl.debug_barrier()  # One thread may load what another one stored.
            earlier = _load_state(
                workspace_ptr,
                totals_ptr,
                own_first,
                stored_row,
                d,
                stored_row < tl.where(split == first_key, 0, tl.load(item_ptr + 4)),
                HEAD_DIM,
            )
            tl.debug_barrier()
            acc, total, reference = _add_split(earlier[0], earlier[1], earlier[2], acc, total, reference)
        if (workspace_row >= 0) | (until_key < end_key):
            _store_state(
                workspace_ptr,
                totals_ptr,
                state_first,
                stored_row,
                d,
                acc,
                total,
                reference,
                is_stored,
                HEAD_DIM,
            )
        else:
            if sinks_ptr is not None:
                acc, total = _add_sink(
                    acc, total, reference, sinks_ptr, item_ptr, stored_row, is_stored, kv_head, GROUP
                )
            tile_out_ptr = out_ptr + (first_token * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
            out = _output(acc, total).to(out_ptr.dtype.element_ty)
            tl.store(tile_out_ptr + row_at[:, None] + d[None, :], out, mask=is_stored[:, None] & in_head)


# `workspace_rows` is not specialized, since another binary could add up in another order.
@triton.jit(do_not_specialize=["workspace_rows"], do_not_specialize_on_alignment=["words_ptr"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, workspace_ptr, totals_ptr, words_ptr, q_stride, workspace_rows, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, FEW_M: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, HAS_CODES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Items pid, pid + grid, ..: outputs of whole tiles, states of cut ones.

    `scale` turns a score into an exponent of 2. `q_stride` is from one token to the next. An item of at most FEW_M
    rows is a tile of as many, if FEW_M is not 0. With a SPLIT of 0 an item is one split. Else each program has
    BLOCK_M rows of its own at the workspace's end, for the state of the splits before the present one. A token sees
    the last WINDOW keys, itself among them, or all if that is 0.
    """
    work_at = tl.load(words_ptr + WORK_WORD)
    num_items = tl.load(words_ptr + work_at) * NUM_KV_HEADS
    own_first = tl.cast(workspace_rows, tl.int64) * NUM_KV_HEADS + tl.program_id(0) * BLOCK_M
    for i in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = i % NUM_KV_HEADS
        item_ptr = words_ptr + work_at + HEADER_WORDS + (i // NUM_KV_HEADS) * ITEM_WORDS
        is_few = tl.load(item_ptr + 4) <= FEW_M
        if FEW_M:  # noqa: SIM102 - known at compile time, and no tile has 0 rows
            if is_few:
                _item(
                    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, workspace_ptr, totals_ptr, words_ptr, item_ptr, kv_head,
                    own_first, q_stride, workspace_rows, scale,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, TILE, SPLIT, HAS_CODES, WINDOW, FEW_M,
                )  # fmt: skip
        if not is_few:
            _item(
                q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, workspace_ptr, totals_ptr, words_ptr, item_ptr, kv_head,
                own_first, q_stride, workspace_rows, scale,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, TILE, SPLIT, HAS_CODES, WINDOW, BLOCK_M,
            )  # fmt: skip


@triton.jit(do_not_specialize=["workspace_rows"], do_not_specialize_on_alignment=["words_ptr"])
def merge_kernel(
    sinks_ptr, out_ptr, workspace_ptr, totals_ptr, words_ptr, workspace_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Merges pid, pid + grid, ..: outputs of cut tiles."""
    work_ptr = words_ptr + tl.load(words_ptr + WORK_WORD)
    num_merges = tl.load(work_ptr + 1) * NUM_KV_HEADS
    merges_ptr = work_ptr + HEADER_WORDS + tl.load(work_ptr) * ITEM_WORDS
    row = tl.arange(0, MERGE_ROWS)
    d = tl.arange(0, BLOCK_D)
    for i in range(tl.program_id(0), num_merges, tl.num_programs(0)):
        kv_head = i % NUM_KV_HEADS
        merge_ptr = merges_ptr + (i // NUM_KV_HEADS) * MERGE_WORDS
        is_row, first_token, row_at = _rows(merge_ptr, row, GROUP, NUM_KV_HEADS * GROUP * HEAD_DIM, HEAD_DIM)
        rows_a_split = tl.load(merge_ptr + 5)
        first = kv_head.to(tl.int64) * workspace_rows + tl.load(merge_ptr + 7)
        acc = tl.zeros((MERGE_ROWS, BLOCK_D), dtype=tl.float32)
        total = tl.zeros((MERGE_ROWS,), dtype=tl.float32)
        reference = tl.full((MERGE_ROWS,), float("-inf"), dtype=tl.float32)
        for split in tl.range(tl.load(merge_ptr + 6), num_stages=4):
            state = _load_state(
                workspace_ptr, totals_ptr, first + split * rows_a_split, row, d, is_row, HEAD_DIM
            )
            acc, total, reference = _add_split(acc, total, reference, state[0], state[1], state[2])
        if sinks_ptr is not None:
            acc, total = _add_sink(acc, total, reference, sinks_ptr, merge_ptr, row, is_row, kv_head, GROUP)
        tile_out_ptr = out_ptr + (first_token * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
        out = _output(acc, total).to(out_ptr.dtype.element_ty)
        tl.store(
            tile_out_ptr + row_at[:, None] + d[None, :], out, mask=is_row[:, None] & (d[None, :] < HEAD_DIM)
        )


class PagedAttention:
    """Both kernels for one shape of heads, with the workspace that they share. Calls run one after the other.

    `num_programs` and `workspace_rows` go into `attention_work`. A call reads what to do from `words` alone, so a
    captured call serves every batch whose tokens fit its q.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        has_codes: bool = False,
        workspace_nbytes: int = WORKSPACE_NBYTES,
        num_programs: int | None = None,
    ) -> None:
        """Raise ConfigError for a head size that cannot be loaded 16 bytes at a time.

        `dtype` is that of q. Pages are of the same, or, if `has_codes`, of codes (`shared.kernels.row_codes`).

        Takes memory for at most `workspace_nbytes` of states, and if `exact` BLOCK_M more for each program.

        `num_programs` is by default as many as the device runs at once.
        """
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        if head_dim * (1 if has_codes else dtype.itemsize) % 16:
            raise ConfigError(
                f"Triton's attention loads 16 bytes at a time, and heads have {head_dim} elements"
            )
        self.num_kv_heads, self.group, self.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self._constants = attention_constants(
            num_heads, num_kv_heads, head_dim, page_size, dtype, exact=exact, has_codes=has_codes
        )
        self.block_m = self._constants["BLOCK_M"]
        self.split = self._constants["SPLIT"]
        num_processors, capability = processors(device)
        self._options = attention_options(capability, self._constants, dtype)
        self._num_merge_programs = 4 * num_processors
        self.num_programs = num_programs or num_processors * WARPS_A_PROCESSOR // self._options["num_warps"]
        self.workspace_rows = workspace_nbytes // (num_kv_heads * (head_dim + 2) * 4)
        num_rows = num_kv_heads * self.workspace_rows + self.num_programs * self.block_m * exact
        self._states_RD = torch.empty(num_rows, head_dim, dtype=torch.float32, device=device)
        self._totals_R2 = torch.empty(num_rows, 2, dtype=torch.float32, device=device)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        words: torch.Tensor,
        *,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        may_cut: bool = True,
    ) -> torch.Tensor:
        """Return the attention [T, H, D] of the tokens that have work; other tokens get anything.

        `words` is an input block, int32, with page tables and `AttentionWork.words` at the places that it tells.
        A token sees the last `window` keys, itself among them. Sinks are scores with a share of the softmax and no
        value. Without `may_cut` the work has no merges.
        """
        num_tokens, num_heads, head_dim = q_THD.shape
        assert (
            q_THD.stride()[1:] == (head_dim, 1)
            and k_pages_NKSD.is_contiguous()
            and v_pages_NKSD.is_contiguous()
        )
        out_THD = torch.empty(num_tokens, num_heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
        workspace = self._states_RD, self._totals_R2, words
        scale = head_dim**-0.5 * math.log2(math.e)
        attention_kernel[(self.num_programs,)](
            q_THD, k_pages_NKSD, v_pages_NKSD, sinks_H, out_THD, *workspace, q_THD.stride(0), self.workspace_rows,
            scale, WINDOW=window or 0, **self._constants, **self._options,
        )  # fmt: skip
        if may_cut:
            merge_kernel[(self._num_merge_programs,)](
                sinks_H,
                out_THD,
                *workspace,
                self.workspace_rows,
                **merge_constants(self._constants),
                **MERGE_OPTIONS,
            )
        return out_THD
