"""The decoder in Python, over the operations and the attention that were chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from shared.engine.attention import AttentionBackend, AttentionPlan
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape, ForwardLimits, InputBlock, padding_batch
from shared.engine.model_runner import Forwarded
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.penalties import Penalize
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.uploads import StartCopy, start_copy_to
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.model.decoder import Decoder
from shared.model.ops import Ops

if TYPE_CHECKING:
    from shared.engine.cuda.cuda_graphs import Graphs

MakeOps = Callable[[ForwardBatch, AttentionPlan, Sequence[tuple[torch.Tensor, torch.Tensor]]], Ops]
"""(forward, its attention, K and V pages of each layer)"""


class TokenOps(Protocol):
    """What happens to tokens on the device before and behind the layers."""

    def resolve(self, batch: ForwardBatch, future_map: FutureMap) -> torch.Tensor:
        """Enter into the FutureMap what the batch brings, then return the input ids, int64 [T]."""
        ...

    @property
    def penalize(self) -> Penalize:
        """What penalizes logits by counted tokens."""
        ...

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """The next token of each row, int64 [S], which enters the FutureMap. The logits may be overwritten."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What computes a decoder in Python on one device."""

    name: str
    """Of --attention-backend."""
    numerics: str
    is_exact: bool
    attention: AttentionBackend
    make_ops: MakeOps
    tokens: TokenOps


class TorchBackend:
    """A ModelBackend made of the decoder and the kernels that compute it."""

    has_threads = False

    def __init__(
        self,
        kernels: Kernels,
        decoder: Decoder,
        pool: AnyKVPool,
        progress: Progress,
        limits: ForwardLimits,
        *,
        graphs: Graphs | None = None,
        start_copy: StartCopy | None = None,
    ) -> None:
        self.name, self.numerics, self.is_exact = kernels.name, kernels.numerics, kernels.is_exact
        self.penalize, self.draw = kernels.tokens.penalize, kernels.tokens.draw
        self.vocab_size = decoder.config.vocab_size
        self._decoder = decoder
        self._attention, self._make_ops, self._tokens = kernels.attention, kernels.make_ops, kernels.tokens
        self._pool, self._context_length = pool, limits.context_length
        self._kv_NKSD = [pool.layer_kv(layer) for layer in range(pool.num_layers)]
        self._layers_queued = _layer_counter(progress, pool.device)
        self._ops: Ops | None = None
        """Of the latest forward that was not replayed."""
        self._graphs = graphs
        self._results = None if graphs is None else _Results.of(graphs.shapes, decoder)
        self._captured: dict[BlockShape, ForwardBatch] = {}
        """What graphs were captured with. Its tensors are those of every forward that is filled for the shape."""
        self._inputs = InputBlock(
            _block_nbytes(kernels.attention, pool, limits, () if graphs is None else graphs.shapes),
            limits.num_rows,
            pool.page_size,
            pool.device,
            start_copy or start_copy_to(pool.device),
        )

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        """Bring the batch to the device, and go through the layers, or replay the graph that does."""
        work = self._attention.work(batch)
        may_cut = self._attention.is_cut(work)
        exact = BlockShape.of(batch)
        padded = self._graphs.shape_for(exact) if self._graphs is not None else None
        if padded is None or not self._inputs.has_room(batch, padded, work):
            fb = self._forward_batch(batch, exact, work)
            plan = _CountedPlan(self._attention.plan(fb, may_cut=may_cut), self._layers_queued)
            hidden_TD, logits_SV = self._compute(fb, plan, future_map)
        else:
            assert self._graphs is not None and self._results is not None
            self._inputs.fill(batch, padded, work)
            self._graphs.replay(padded, may_cut)
            self._layers_queued(self._pool.num_layers)
            fb = self._captured[padded]
            hidden_TD, logits_SV = self._results.hidden_TD, self._results.logits_SV
        num_sampled, wanted = len(batch.sampled_B), batch.sampling.input_logprobs
        return Forwarded(
            logits_SV[:num_sampled] if logits_SV is not None and num_sampled else None,
            fb.rows_S[:num_sampled],
            batch.sampling,
            None if wanted is None else hidden_TD[fb.hidden_rows_T[: len(wanted.rows_N)]],
        )

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The decoder's, as in the latest forward."""
        assert self._ops is not None, "there was a forward"
        return self._decoder.logits(hidden_ND, self._ops)

    def measure_graphs(self, future_map: FutureMap) -> int:
        """Capture the largest ones over this pool, and drop them."""
        return 0 if self._graphs is None else self._graphs.measure(partial(self._forward_of, future_map))

    def capture_graphs(self, future_map: FutureMap) -> None:
        """Capture the graphs of each shape."""
        if self._graphs is not None:
            self._graphs.capture(partial(self._forward_of, future_map))

    def close(self) -> None:
        """Do nothing: torch frees its memory."""

    def _forward_batch(self, batch: ModelWorkerBatch, shape: BlockShape, work: np.ndarray) -> ForwardBatch:
        return ForwardBatch.from_model_worker_batch(batch, self._inputs.fill(batch, shape, work))

    def _compute(
        self, fb: ForwardBatch, plan: AttentionPlan, future_map: FutureMap, results: _Results | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, D] and logits [S, V], None for no S; for a graph in the memory of `results`."""
        hidden_TD = None if results is None else results.hidden_TD[: fb.shape.num_tokens]
        logits_SV = None if results is None else results.logits_SV[: fb.shape.num_sequences]
        self._ops = ops = self._make_ops(fb, plan, self._kv_NKSD)
        input_ids_T = self._tokens.resolve(fb, future_map)
        hidden_TD = self._decoder.forward(input_ids_T, fb.positions_T, ops, hidden_TD)
        if not len(fb.last_token_S):
            return hidden_TD, None
        return hidden_TD, self._decoder.logits(hidden_TD[fb.last_token_S], ops, logits_SV)

    def _forward_of(self, future_map: FutureMap, shape: BlockShape, may_cut: bool) -> Callable[[], None]:
        """What is captured for `shape`. The input block holds a padding batch, for kernels to be tried on."""
        row, page_size = future_map.padding_row, self._pool.page_size
        batch = padding_batch(shape, row, page_size, self._context_length)
        work = self._attention.work(batch)
        assert self._inputs.has_room(batch, shape, work), "a graph knows one block"
        fb = self._captured[shape] = self._forward_batch(batch, shape, work)

        def forward() -> None:
            self._compute(fb, self._attention.plan(fb, may_cut=may_cut), future_map, self._results)

        return forward


@dataclass(frozen=True, slots=True)
class _Results:
    """Where graphs leave what they compute. One at a time runs, so all of them share it."""

    hidden_TD: torch.Tensor
    logits_SV: torch.Tensor

    @classmethod
    def of(cls, shapes: Sequence[BlockShape], decoder: Decoder) -> _Results:
        """Memory for the largest of `shapes`."""
        weights, config = decoder.weights.embed_VD, decoder.config
        num_tokens = max(shape.num_tokens for shape in shapes)
        num_sequences = max(shape.num_sequences for shape in shapes)
        return cls(
            weights.new_empty(num_tokens, config.hidden_size),
            weights.new_empty(num_sequences, config.vocab_size, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True)
class _CountedPlan:
    """An AttentionPlan that counts layers."""

    plan: AttentionPlan
    layers_queued: Callable[[int], None]

    def run(
        self,
        q_THD: torch.Tensor,
        k_pages_NKSD: torch.Tensor,
        v_pages_NKSD: torch.Tensor,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """The plan's result."""
        out_THD = self.plan.run(q_THD, k_pages_NKSD, v_pages_NKSD, window, sinks_H)
        self.layers_queued(1)
        return out_THD


def _layer_counter(progress: Progress, device: torch.device) -> Callable[[int], None]:
    """Counts layers that were launched just now, when they are computed: on a CPU they are."""

    def computed(num_layers: int) -> None:
        progress.layers[0] += num_layers

    def queued(num_layers: int) -> None:
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record()
        progress.queued(num_layers, partial(_is_reached, reached))

    return queued if device.type == "cuda" else computed


def _is_reached(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except torch.AcceleratorError:
        return False  # the device is lost; the next wait of the forward stream raises this error and ends the node


def _block_nbytes(
    attention: AttentionBackend, pool: AnyKVPool, limits: ForwardLimits, shapes: Sequence[BlockShape]
) -> int:
    """Room for the largest forward, and for every row's page tables beside the largest graph."""
    num_tables = 2 if isinstance(pool, WindowedKVPool) else 1
    table_words = num_tables * limits.num_rows * -(-limits.context_length // pool.page_size)
    largest = BlockShape(limits.max_tokens, limits.num_rows)
    return max(
        shape.nbytes(table_words + attention.max_work_words(shape, limits.context_length))
        for shape in (largest, *shapes)
    )
