"""Which backend computes the model here, and the model loaded for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shared import log
from shared.engine.attention import Progress
from shared.engine.model_runner import ModelBackend
from shared.engine.native_backend import NativeBackend
from shared.engine.torch_backend import TorchBackend
from shared.errors import ConfigError
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import Team, load_library
from shared.kvcache.pools import TokenToKVPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.packed_weights import PackedWeights, load_packed_weights, native_obstacle

OnProgress = Callable[[str, float], None]
"""(what is being done, fraction done)"""


class LoadedModel(Protocol):
    """Weights in memory; how much is left for the KV pool is known once they are."""

    def bind(self, pool: TokenToKVPool, progress: Progress) -> ModelBackend:
        """The backend that computes over `pool`. Called once."""
        ...


@dataclass(frozen=True)
class TorchModel:
    """See LoadedModel."""

    decoder: Decoder

    def bind(self, pool: TokenToKVPool, progress: Progress) -> TorchBackend:
        """See LoadedModel."""
        return TorchBackend(self.decoder, pool, progress)


@dataclass(frozen=True)
class NativeModel:
    """See LoadedModel."""

    config: ModelConfig
    weights: PackedWeights
    team: Team

    def bind(self, pool: TokenToKVPool, progress: Progress) -> NativeBackend:
        """See LoadedModel."""
        return NativeBackend(self.config, self.weights, self.team, pool, progress)


def load_model(
    kernels: str,
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cores: Sequence[int],
    on_progress: OnProgress,
) -> LoadedModel:
    """Load a model for the backend that `kernels` (--cpu-kernels) asks for, or the fastest that can be had.

    `cores` are those of the native backend's threads, of which the first is the forward stream's own; below 0: any.
    Raises ConfigError when `native` is asked for and cannot be had, and ModelError for what is wrong in the folder.
    """
    team = _native_team(kernels, config, dtype, device, cores, on_progress)

    def loading(fraction: float) -> None:
        on_progress("loading weights", fraction)

    loading(0.0)
    if team is None:
        return TorchModel(Decoder.load(folder, config, dtype=dtype, device=device, on_progress=loading))
    try:
        return NativeModel(config, load_packed_weights(folder, config, team, on_progress=loading), team)
    except BaseException:
        team.close()
        raise


def _native_team(
    kernels: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cores: Sequence[int],
    on_progress: OnProgress,
) -> Team | None:
    """The threads of the native backend; None where torch computes."""
    try:
        if kernels == "torch":
            raise NativeUnavailable("--cpu-kernels torch")
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
        if kernels == "native":
            raise ConfigError(f"--cpu-kernels native: {reason}") from reason
        if device.type == "cpu":
            log.event("no_native_kernels", reason=str(reason))
        return None
