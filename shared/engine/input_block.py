"""The inputs of a forward in one block, at places that a captured graph can know.

    header        int32 [4]: `Header`
    per token     int64 [T] each: input_ids, positions, out_pages, out_window_pages, out_offsets, hidden_rows
    per sequence  int64 [B] each: future_rows, future_tokens, seq_lens, rows, last_tokens
    page tables   int32 [number of sequences, stride] each: one, and that of layers with windows if it is another
    work          int32: what the attention backend has planned on the host

The places of all but the tables and the work depend on the block's shape (T, B) alone. Where those are, and how wide
a page table is, are words of the header, which kernels read as data. So the kernels of a graph find everything from
the address of the block, which never changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.uploads import BlockRing, StartCopy
from shared.kernels.triton.attention_work import Header

HEADER_NBYTES = 16
_PER_TOKEN, _PER_SEQUENCE = 6, 5


@dataclass(frozen=True, order=True, slots=True)
class BlockShape:
    """T tokens of B sequences: those of a forward, or as many as a graph was captured for."""

    num_tokens: int
    num_sequences: int

    @staticmethod
    def of(batch: ModelWorkerBatch) -> BlockShape:
        """The shape without padding."""
        return BlockShape(len(batch.input_ids) + batch.num_decodes, len(batch.rows_B))

    def holds(self, other: BlockShape) -> bool:
        """True if a forward of shape `other` can be padded to this one."""
        return other.num_tokens <= self.num_tokens and other.num_sequences <= self.num_sequences

    def nbytes(self, num_words: int) -> int:
        """The size of a block whose page tables and work have `num_words` words together."""
        return self.table_at + 4 * num_words

    @property
    def table_at(self) -> int:
        """Where the page tables begin, in bytes."""
        return HEADER_NBYTES + 8 * (
            _PER_TOKEN * _even(self.num_tokens) + _PER_SEQUENCE * _even(self.num_sequences)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardLimits:
    """The largest forwards of a node."""

    num_rows: int
    context_length: int
    max_tokens: int
    """A forward with more tokens takes a block of its own."""


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block on its way to the device: words of it, int32, and the shape that it was filled for."""

    words: torch.Tensor
    shape: BlockShape

    def per_token(self) -> tuple[torch.Tensor, ...]:
        """The parts that are [T]."""
        return _parts(self._numbers(), 0, _PER_TOKEN, self.shape.num_tokens)

    def per_sequence(self) -> tuple[torch.Tensor, ...]:
        """The parts that are [B]."""
        first = _PER_TOKEN * _even(self.shape.num_tokens)
        return _parts(self._numbers(), first, _PER_SEQUENCE, self.shape.num_sequences)

    def page_tables(self, batch: ModelWorkerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """That of the batch, int32 [B, P], and that of its layers with windows."""
        first, size = self.shape.table_at // 4, batch.page_table_BP.size
        second = first if batch.window_table_BP is None else first + size
        table, windows = (
            self.words[at : at + size].view(batch.page_table_BP.shape) for at in (first, second)
        )
        return table, windows

    def _numbers(self) -> torch.Tensor:
        return self.words[HEADER_NBYTES // 4 : self.shape.table_at // 4].view(torch.int64)


class InputBlock:
    """The block of one engine, whose place on the device never changes. Used on the forward stream."""

    def __init__(
        self,
        nbytes: int,
        num_rows: int,
        page_size: int,
        device: torch.device,
        start_copy: StartCopy | None,
    ) -> None:
        self._device, self._start_copy = device, start_copy
        self._ring = BlockRing(nbytes, device, start_copy)
        self._padding_row = num_rows
        self._page_size = page_size

    def has_room(self, batch: ModelWorkerBatch, shape: BlockShape, work: np.ndarray) -> bool:
        """True if a forward that is padded to `shape` fits."""
        return shape.nbytes(sum(table.size for table in _tables(batch)) + len(work)) <= self._ring.nbytes

    def fill(self, batch: ModelWorkerBatch, shape: BlockShape, work: np.ndarray) -> FilledBlock:
        """Pack `batch`, padded to `shape`, and queue its one copy to the device.

        A padding token is token 0 at position 0 of page 0, of no sequence. A padding sequence has no tokens, and its
        row is the FutureMap's padding row. A batch for which there is no room gets a block of its own.
        """
        tables = _tables(batch)
        table, size = shape.table_at // 4, batch.page_table_BP.size
        work_at = table + size * len(tables)
        nbytes = 4 * (work_at + len(work))
        ring = self._ring
        if nbytes > ring.nbytes:
            ring = BlockRing(nbytes, self._device, self._start_copy)
        host = ring.fill()[:nbytes]
        words = host.view(np.int32)
        words[Header.PAGE_TABLE], words[Header.WINDOW_TABLE] = table, work_at - size
        words[Header.TABLE_STRIDE] = batch.page_table_BP.shape[1]
        words[Header.WORK] = work_at
        self._fill_numbers(host[HEADER_NBYTES : shape.table_at].view(np.int64), batch, shape)
        for i, table_BP in enumerate(tables):
            words[table + i * size : table + (i + 1) * size] = table_BP.reshape(-1)
        words[work_at:] = work
        ring.send(nbytes)
        return FilledBlock(ring.on_device.view(torch.int32), shape)

    def _fill_numbers(self, numbers: np.ndarray, batch: ModelWorkerBatch, shape: BlockShape) -> None:
        """Fill the parts that are int64."""
        lengths_B, ends_B = batch.lengths_B, np.cumsum(batch.lengths_B)
        sequence_T = np.repeat(np.arange(len(batch.rows_B)), lengths_B)
        positions_T = np.arange(len(sequence_T)) + (batch.starts_B - ends_B + lengths_B)[sequence_T]
        tables, place_T = _tables(batch), (sequence_T, positions_T // self._page_size)
        decode_rows = batch.rows_B[len(batch.rows_B) - batch.num_decodes :]
        wanted = batch.sampling.input_logprobs
        per_token = (
            np.concatenate((batch.input_ids, -1 - decode_rows)),
            positions_T,
            tables[0][place_T],
            tables[-1][place_T],
            positions_T % self._page_size,
            () if wanted is None else wanted.rows_N,
        )
        writes = np.array(batch.future_writes, dtype=np.int64).reshape(-1, 2)
        per_sequence = (
            (writes[:, 0], self._padding_row),
            (writes[:, 1], 0),
            (batch.starts_B + lengths_B, 0),
            (batch.rows_B[batch.sampled_B], self._padding_row),
            (ends_B[batch.sampled_B] - 1, 0),
        )
        first = 0
        for values in per_token:
            _put(numbers[first : first + shape.num_tokens], values, 0)
            first += _even(shape.num_tokens)
        for values, padding in per_sequence:
            _put(numbers[first : first + shape.num_sequences], values, padding)
            first += _even(shape.num_sequences)


def _tables(batch: ModelWorkerBatch) -> tuple[np.ndarray, ...]:
    """The page table, and that of layers with windows if it is another."""
    windows = batch.window_table_BP
    return (batch.page_table_BP,) if windows is None else (batch.page_table_BP, windows)


def _put(part: np.ndarray, values: np.ndarray | tuple[()], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def _parts(numbers: torch.Tensor, first: int, count: int, length: int) -> tuple[torch.Tensor, ...]:
    stride = _even(length)
    return tuple(numbers[first + i * stride : first + i * stride + length] for i in range(count))


def _even(length: int) -> int:
    """Round up, so that every part begins at 16 bytes."""
    return length + length % 2


def padding_batch(shape: BlockShape, row: int, page_size: int, context_length: int) -> ModelWorkerBatch:
    """A batch that fills `shape`, and reads and writes nothing but `row` of the FutureMap and page 0.

    Kernels are tried on it before a graph of the shape is captured.
    """
    num = shape.num_sequences
    lengths_B = np.full(num, shape.num_tokens // num)
    lengths_B[: shape.num_tokens % num] += 1
    lengths_B = np.minimum(lengths_B, context_length)
    return ModelWorkerBatch(
        num_decodes=0,
        input_ids=np.zeros(int(lengths_B.sum()), dtype=np.int64),
        rows_B=np.full(num, row, dtype=np.int64),
        starts_B=np.zeros(num, dtype=np.int64),
        lengths_B=lengths_B,
        page_table_BP=np.zeros((num, -(-int(lengths_B[0]) // page_size)), dtype=np.int32),
        sampled_B=np.arange(num, dtype=np.int64),
        sampling=SamplingInputs(),
        future_writes=(),
    )
