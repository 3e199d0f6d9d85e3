"""The model by native calls on a CPU: one for a forward, one for sampling, both without the GIL.

The scheduler's Python runs beside them, and no Python runs between two layers. The snapshot's arrays are read where
they are, and so is the FutureMap.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.future_map import FutureMap
from shared.engine.model_runner import Forwarded
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.penalties import penalize
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import DrawInputs, SamplingInputs, adjust_logits
from shared.kernels.cpu.decoder import BatchDesc, KVPool, NativeDecoder, Sampling, sample
from shared.kernels.cpu.library import Team, numerics
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.model.config import ModelConfig
from shared.model.packed_weights import PackedWeights


class NativeBackend:
    """A ModelBackend whose forward, attention included, is C++ (ADR 12)."""

    name = "native"
    is_exact = True
    has_threads = True
    penalize = staticmethod(penalize)

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedWeights,
        team: Team,
        pool: AnyKVPool,
        progress: Progress,
    ) -> None:
        """The backend owns `team`, and ends it in `close`."""
        self.numerics = f"native-{numerics(team.library)}"
        self.vocab_size = config.vocab_size
        self._hidden_size = config.hidden_size
        self._team = team
        pages = _pages_of(pool)
        self._decoder = NativeDecoder(team, weights.desc, pages, (weights, pool))
        self._progress = progress
        self._logits = np.empty(0, dtype=np.float32)
        """The logits of the latest forward, which samples before the next one runs."""

    def forward(self, batch: ModelWorkerBatch, future_map: FutureMap) -> Forwarded:
        """One native call, which reads the snapshot's arrays where they are."""
        wanted = batch.sampling.input_logprobs
        logits_SV = self._logits_buffer(len(batch.sampled_B))
        rows_N = wanted.rows_N if wanted is not None else np.empty(0, dtype=np.int64)
        hidden_ND = np.empty((len(rows_N), self._hidden_size), dtype=np.float32)
        writes = np.array(batch.future_writes, dtype=np.int64).reshape(-1, 2).T.copy()
        page_table_BP = np.ascontiguousarray(batch.page_table_BP)
        windows = batch.window_table_BP
        window_table_BP = None if windows is None else np.ascontiguousarray(windows)
        self._decoder.forward(
            BatchDesc(
                num_sequences=len(batch.rows_B),
                num_decodes=batch.num_decodes,
                rows=batch.rows_B.ctypes.data,
                starts=batch.starts_B.ctypes.data,
                lengths=batch.lengths_B.ctypes.data,
                page_table=page_table_BP.ctypes.data,
                window_table=None if window_table_BP is None else window_table_BP.ctypes.data,
                table_stride=page_table_BP.shape[1],
                input_ids=batch.input_ids.ctypes.data,
                last_tokens=future_map.last_token_R.data_ptr(),
                num_future_writes=writes.shape[1],
                future_rows=writes[0].ctypes.data,
                future_tokens=writes[1].ctypes.data,
                num_sampled=len(batch.sampled_B),
                sampled=batch.sampled_B.ctypes.data,
                logits=logits_SV.ctypes.data,
                num_hidden=len(rows_N),
                hidden_rows=rows_N.ctypes.data,
                hidden=hidden_ND.ctypes.data,
                progress=self._progress.layers.ctypes.data,
            )
        )
        return Forwarded(
            torch.from_numpy(logits_SV) if len(logits_SV) else None,
            torch.from_numpy(batch.rows_B[batch.sampled_B]),
            batch.sampling,
            None if wanted is None else torch.from_numpy(hidden_ND),
        )

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """One native call."""
        out_NV = torch.empty(len(hidden_ND), self.vocab_size)
        self._decoder.logits(hidden_ND.data_ptr(), len(hidden_ND), out_NV.data_ptr())
        return out_NV

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """Biases and masks by torch, then one native call."""
        adjust_logits(logits_SV, inputs)
        return sample(self._team, logits_SV, _sampling(inputs.draws), rows_S, future_map.last_token_R)

    def measure_graphs(self, future_map: FutureMap) -> int:
        """There are none."""
        return 0

    def capture_graphs(self, future_map: FutureMap) -> None:
        """There are none."""

    def close(self) -> None:
        """End the threads and free the scratch memory."""
        self._decoder.close()
        self._team.close()

    def _logits_buffer(self, num_rows: int) -> np.ndarray:
        """[num_rows, vocab_size] of memory that was touched before: fresh pages cost more than the sampling."""
        if len(self._logits) < num_rows * self.vocab_size:
            self._logits = np.empty(num_rows * self.vocab_size, dtype=np.float32)
        return self._logits[: num_rows * self.vocab_size].reshape(num_rows, self.vocab_size)


def _pages_of(pool: AnyKVPool) -> KVPool:
    full, window = (pool.full, pool.window) if isinstance(pool, WindowedKVPool) else (pool, None)
    return KVPool(
        pages=full.buffer_LSNHPD.data_ptr(),
        num_pages=full.num_pages,
        window_pages=None if window is None else window.buffer_LSNHPD.data_ptr(),
        num_window_pages=0 if window is None else window.num_pages,
        page_size=pool.page_size,
        has_codes=pool.dtype == torch.int8,
    )


def _sampling(draws: DrawInputs[torch.Tensor] | None) -> Sampling:
    if draws is None:
        return Sampling()
    tensors = draws.temperatures_S, draws.top_ks_S, draws.top_ps_S, draws.min_ps_S, draws.uniforms_S
    return Sampling.of(*(tensor.numpy() for tensor in tensors))
