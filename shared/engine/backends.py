"""Which backend computes the model here (--attention-backend), and the model loaded for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared import log
from shared.engine.attention import AttentionBackend, TorchAttention
from shared.engine.cuda_graphs import CudaGraphPool, Graphs, graph_shapes
from shared.engine.input_block import ForwardLimits
from shared.engine.model_runner import ModelBackend
from shared.engine.native_backend import NativeBackend
from shared.engine.progress import Progress
from shared.engine.start.share import OnProgress
from shared.engine.torch_backend import TorchBackend
from shared.errors import ConfigError
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import Team, load_library
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.packed_weights import PackedWeights, load_packed_weights, native_obstacle
from shared.model.weights import WeightSource

ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": TorchAttention}
"""Those of the decoder in Python. `native` is none of them: its decoder computes attention itself (ADR 14)."""


class LoadedModel(Protocol):
    """Weights in memory; how much is left for the KV pool is known once they are."""

    def bind(self, pool: TokenToKVPool, progress: Progress, limits: ForwardLimits) -> ModelBackend:
        """The backend that computes forwards up to `limits` over `pool`.

        A GPU node makes two: the first is measured, then closed.
        """
        ...


@dataclass(frozen=True)
class TorchModel:
    """Weights for the decoder in Python, and the attention backend that it will use."""

    decoder: Decoder
    attention_backend: str
    cuda_graph_max_bs: int | None
    """Most sequences of a forward that is replayed from a CUDA graph; None: no graphs."""

    def bind(self, pool: TokenToKVPool, progress: Progress, limits: ForwardLimits) -> TorchBackend:
        """A TorchBackend, with graphs on a GPU if its attention can be captured."""
        attention = ATTENTION_BACKENDS[self.attention_backend]()
        graphs = None
        if pool.device.type == "cuda" and self.cuda_graph_max_bs is not None:
            if attention.capturable:
                max_bs = min(self.cuda_graph_max_bs, limits.num_rows)
                graphs = Graphs(CudaGraphPool(pool.device), graph_shapes(max_bs))
            else:
                log.event(
                    "no_cuda_graphs", reason=f"--attention-backend {self.attention_backend} allows none"
                )
        return TorchBackend(
            self.attention_backend, self.decoder, attention, pool, progress, limits, graphs=graphs
        )


@dataclass(frozen=True)
class NativeModel:
    """Packed weights, and the threads that will compute with them."""

    config: ModelConfig
    weights: PackedWeights
    team: Team

    def bind(self, pool: TokenToKVPool, progress: Progress, limits: ForwardLimits) -> NativeBackend:
        """A NativeBackend, which ends the threads when it is closed."""
        return NativeBackend(self.config, self.weights, self.team, pool, progress)


def load_model(
    attention_backend: str,
    source: WeightSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cores: Sequence[int],
    on_progress: OnProgress,
    cuda_graph_max_bs: int | None = None,
) -> LoadedModel:
    """Load a model for `attention_backend`, or for the fastest that can be had where that is `auto`.

    `cores` are those of the native backend's threads, of which the first is the forward stream's own; below 0: any.
    Raises ConfigError when `native` is asked for and cannot be had, and ModelError for what is wrong with `source`.
    """
    team = _native_team(attention_backend, config, dtype, device, cores, on_progress)

    def loading(fraction: float) -> None:
        on_progress("loading weights", fraction)

    loading(0.0)
    if team is None:
        decoder = Decoder.load(source, config, dtype=dtype, device=device, on_progress=loading)
        name = "torch" if attention_backend == "auto" else attention_backend
        return TorchModel(decoder, name, cuda_graph_max_bs)
    try:
        return NativeModel(config, load_packed_weights(source, config, team, on_progress=loading), team)
    except BaseException:
        team.close()
        raise


def _native_team(
    attention_backend: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cores: Sequence[int],
    on_progress: OnProgress,
) -> Team | None:
    """The threads of the native backend; None where the decoder in Python computes."""
    try:
        if attention_backend in ATTENTION_BACKENDS:
            raise NativeUnavailable(f"--attention-backend {attention_backend}")
        if device.type != "cpu":
            raise NativeUnavailable(f"they are for CPUs, and this is {device}")
        if dtype != torch.bfloat16:
            raise NativeUnavailable(
                f"they compute in bfloat16, and --dtype makes it {str(dtype).removeprefix('torch.')}"
            )
        if obstacle := native_obstacle(config):
            raise NativeUnavailable(f"{config.architecture}: {obstacle}")
        return Team(load_library(on_build=lambda: on_progress("building kernels", 0.0)), cores)
    except NativeUnavailable as reason:
        if attention_backend == "native":
            raise ConfigError(f"--attention-backend native: {reason}") from reason
        if device.type == "cpu":
            log.event("no_native_kernels", reason=str(reason))
        return None
