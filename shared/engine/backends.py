"""Which backend computes the model here (--attention-backend), and the model loaded for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from shared import log
from shared.engine.device_share import OnProgress
from shared.engine.input_block import ForwardLimits
from shared.engine.model_runner import ModelBackend
from shared.engine.native_backend import NativeBackend
from shared.engine.progress import Progress
from shared.engine.torch_backend import Kernels, TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.errors import ConfigError
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import Team, load_library
from shared.kvcache.windowed_pool import AnyKVPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.packed_weights import PackedWeights, load_packed_weights, native_obstacle
from shared.model.weight_source import WeightSource

if TYPE_CHECKING:
    from shared.engine.cuda.cuda_graphs import GraphPool, Graphs


class LoadedModel(Protocol):
    """Weights in memory; how much is left for the KV pool is known once they are."""

    def bind(self, pool: AnyKVPool, progress: Progress, limits: ForwardLimits) -> ModelBackend:
        """The backend that computes forwards up to `limits` over `pool`.

        A GPU node makes two: the first is measured, then closed.
        """
        ...


@dataclass(frozen=True)
class TorchModel:
    """Weights for the decoder in Python, and what will compute with them."""

    decoder: Decoder
    make_kernels: Callable[[AnyKVPool], Kernels]
    cuda_graph_max_bs: int | None
    """Most sequences of a forward that is replayed from a CUDA graph; None: no graphs."""

    def bind(self, pool: AnyKVPool, progress: Progress, limits: ForwardLimits) -> TorchBackend:
        """A TorchBackend, with graphs on a GPU if its attention can be captured."""
        kernels = self.make_kernels(pool)
        graphs = choose_graphs(kernels, self.cuda_graph_max_bs, pool.device, limits)
        return TorchBackend(kernels, self.decoder, pool, progress, limits, graphs=graphs)


def choose_graphs(
    kernels: Kernels,
    max_bs: int | None,
    device: torch.device,
    limits: ForwardLimits,
    new_pool: Callable[[torch.device], GraphPool] | None = None,
) -> Graphs | None:
    """The graphs of forwards of at most `max_bs` sequences, None where there are none; `new_pool` replaces CUDA's."""
    if device.type != "cuda" or max_bs is None:
        return None
    if not kernels.attention.capturable:
        log.event("no_cuda_graphs", reason=f"--attention-backend {kernels.name} allows none")
        return None
    from shared.engine.cuda.cuda_graphs import CudaGraphPool, Graphs, graph_shapes

    return Graphs(
        (new_pool or CudaGraphPool)(device), graph_shapes(min(max_bs, limits.num_rows), limits.max_tokens)
    )


@dataclass(frozen=True)
class NativeModel:
    """Packed weights, and the threads that will compute with them."""

    config: ModelConfig
    weights: PackedWeights
    team: Team

    def bind(self, pool: AnyKVPool, progress: Progress, limits: ForwardLimits) -> NativeBackend:
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
    exact: bool = False,
) -> LoadedModel:
    """Load a model for `attention_backend`, or for the fastest that can be had where that is `auto`.

    `cores` are those of the native backend's threads, of which the first is the forward stream's own; below 0: any.
    Raises ConfigError when a backend or `exact` is asked for and cannot be had, and ModelError for what is wrong with
    `source`.
    """
    team = _native_team(attention_backend, config, dtype, device, cores, on_progress)

    def loading(fraction: float) -> None:
        on_progress("loading weights", fraction)

    if team is None:
        make_kernels = _make_kernels(attention_backend, exact, config, dtype, device)
        loading(0.0)
        decoder = Decoder.load(source, config, dtype=dtype, device=device, on_progress=loading)
        if device.type == "cuda" and cuda_graph_max_bs is not None and not decoder.weights.groups_experts:
            log.event("no_cuda_graphs", reason="the host waits for the choice of experts in every layer")
            cuda_graph_max_bs = None
        return TorchModel(decoder, make_kernels, cuda_graph_max_bs)
    loading(0.0)
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
        if attention_backend not in ("auto", "native"):
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


def _make_kernels(
    attention_backend: str, exact: bool, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Callable[[AnyKVPool], Kernels]:
    """What computes the decoder in Python over a pool. Triton is imported where it is chosen."""
    obstacle = _triton_obstacle(attention_backend, config, dtype, device)
    if obstacle is None:
        from shared.engine.cuda.triton_kernels import triton_kernels

        return triton_kernels(config, dtype, device, exact=exact)
    if attention_backend == "triton":
        raise ConfigError(f"--attention-backend triton: {obstacle}")
    if exact:
        raise ConfigError(
            f"--exact: torch's operations are not exact, and Triton's cannot be had: {obstacle}"
        )
    return lambda pool: torch_kernels(pool.device)


def _triton_obstacle(
    attention_backend: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    if attention_backend == "torch":
        return "--attention-backend torch"
    if device.type != "cuda":
        return f"its kernels are for GPUs, and this is {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if config.head_dim * dtype.itemsize % 16:
        return f"a head of {config.head_dim} elements is not a multiple of 16 bytes"
    try:
        import triton  # noqa: F401  it takes a second, and CPUs do without it
    except ImportError as error:
        return str(error)
    return None
