"""CUDA graphs on a CPU: the captured forward, called again, with all memory spoiled that it must not rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.engine.forward_batch import ForwardBatch
from shared.engine.input_block import BlockShape
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.torch_ops import TorchOps
from shared.kernels.reference import extend_attention
from shared.kernels.triton.attention_work import Header
from shared.model.experts import multiply
from shared.model.linear import Linear
from shared.model.ops import Rotary
from shared.model.weights import ExpertsWeights

CUT_FROM = 24


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors are made inside, and which were there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.Tensor] = {}
        self.found: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and (at := _storage(tensor)) not in self.made:
                self.found[at] = tensor
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (at := _storage(tensor)) not in self.found:
                self.made[at] = tensor
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def spoil(tensor: torch.Tensor) -> None:
    """Overwrite all memory behind `tensor` with NaN, and with 127 in every byte if its type has no NaN."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    flat.fill_(torch.nan) if flat.is_floating_point() else flat.view(torch.uint8).fill_(127)


@dataclass
class FakeGraph:
    """A captured forward. What it makes is spoiled after each replay, as memory that other graphs share is."""

    forward: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        with _Memory() as memory:
            self.forward()
        for tensor in memory.made.values():
            spoil(tensor)


@dataclass
class FakeGraphPool:
    """`found` is all memory that captured forwards have read or written, and that was there before."""

    found: dict[int, torch.Tensor] = field(default_factory=dict)
    graphs: list[FakeGraph] = field(default_factory=list)
    free: int = 1 << 30
    nbytes_of: list[int] = field(default_factory=list)
    """What each capture takes of `free`."""

    def capture(self, forward: Callable[[], None]) -> FakeGraph:
        with _Memory() as memory:
            forward()
        self.found |= memory.found
        self.free -= self.nbytes_of.pop(0) if self.nbytes_of else 0
        self.graphs.append(FakeGraph(forward))
        return self.graphs[-1]

    def free_nbytes(self) -> int:
        return self.free


class Copied:
    """The point behind a copy that is done."""

    def synchronize(self) -> None:
        pass


def copy_to_spoiled_block(to: torch.Tensor, source: torch.Tensor) -> Copied:
    """A copy to a device: what the block held before is gone, and what the host has sent may be overwritten."""
    spoil(to)
    to.copy_(source)
    spoil(source)
    return Copied()


@dataclass(frozen=True)
class BlockAttentionPlan:
    """Reads what a kernel would, when it runs: the header, the page table and the work of the block."""

    words: torch.Tensor
    may_cut: bool

    def run(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        words: np.ndarray = self.words.numpy()
        stride, table, work = (words[at] for at in (Header.TABLE_STRIDE, Header.PAGE_TABLE, Header.WORK))
        items = words[work + 1 : work + 1 + 3 * words[work]].reshape(-1, 3)
        out_THD = torch.full_like(q_THD, torch.nan)
        for b, (first, start, length) in enumerate(items.tolist()):
            if start + length > CUT_FROM and not self.may_cut:
                continue
            pages_P = torch.from_numpy(words[table + b * stride : table + (b + 1) * stride]).long()
            part = slice(first, first + length)
            out_THD[part] = extend_attention(
                q_THD[part], k_pages_NKSD, v_pages_NKSD, pages_P[None], [start], [length], window, sinks_H
            )
        return out_THD


class BlockAttention:
    """A capturable backend, whose plan holds nothing of a batch but the block's address. Padding attends to NaN.

    Of a sequence of more than CUT_FROM tokens only a plan for work that may be cut gives anything but NaN.
    """

    capturable = True

    def work(self, batch: ModelWorkerBatch) -> np.ndarray:
        first_tokens_B = np.cumsum(batch.lengths_B) - batch.lengths_B
        items = np.stack([first_tokens_B, batch.starts_B, batch.lengths_B], axis=1)
        return np.concatenate([[len(items)], items.reshape(-1)]).astype(np.int32)

    def max_work_words(self, shape: BlockShape, context_length: int) -> int:
        return 1 + 3 * shape.num_sequences

    def is_cut(self, work: np.ndarray) -> bool:
        items = work[1:].reshape(-1, 3)
        return bool((items[:, 1] + items[:, 2] > CUT_FROM).any())

    def plan(self, batch: ForwardBatch, *, may_cut: bool) -> BlockAttentionPlan:
        return BlockAttentionPlan(batch.words, may_cut)


@dataclass(frozen=True)
class RowwiseOps:
    """torch's operations, with products whose bits do not depend on how many rows they have."""

    ops: TorchOps

    @classmethod
    def make(cls, *args: Any) -> RowwiseOps:
        return cls(TorchOps(*args))

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        rows = [self.ops.linear(x_TK[i : i + 1], linear) for i in range(len(x_TK))]
        return torch.cat(rows) if rows else self.ops.linear(x_TK, linear)

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        return self.ops.embed(input_ids_T, table_VD)

    def rotary(self, positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        return self.ops.rotary(positions_T, waves_2R, dtype)

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.add_norm(x_TD, residual_TD, weight_D, eps)

    def norm_rope_write(self, *args: Any) -> torch.Tensor:
        return self.ops.norm_rope_write(*args)

    def attend(
        self, layer: int, q_THD: torch.Tensor, window: int | None, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        return self.ops.attend(layer, q_THD, window, sinks_H)

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        return self.ops.silu_mul(gate_up_TG)

    def gelu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        return self.ops.gelu_mul(gate_up_TG)

    def experts(
        self, x_TD: torch.Tensor, scores_TE: torch.Tensor, weights: ExpertsWeights[Linear]
    ) -> torch.Tensor:
        return multiply(x_TD, scores_TE, weights, self)
