"""A decoder's weights: from safetensors files straight into their final, fused buffers.

The checkpoint's q, k and v projections are row ranges of one buffer, and so are gate and up; each tensor is
memory-mapped, converted and copied into its range, so that peak memory stays near one copy. Names and shapes of all
tensors are checked before the first byte is read.

Shape suffixes: V vocabulary, D hidden size (head_dim after a heads axis), N = num_heads + num_kv_heads,
A = num_heads * head_dim, Q = (num_heads + 2 * num_kv_heads) * head_dim, F intermediate size, G = 2 * F.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelError
from shared.model.config import ModelConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer. Matmul weights are [out, in]; a bias that the architecture lacks is None."""

    input_norm_D: torch.Tensor
    qkv_proj_QD: torch.Tensor
    qkv_bias_Q: torch.Tensor | None
    qk_norm_ND: torch.Tensor | None
    o_proj_DA: torch.Tensor
    o_bias_D: torch.Tensor | None
    post_attention_norm_D: torch.Tensor
    gate_up_proj_GD: torch.Tensor
    gate_up_bias_G: torch.Tensor | None
    down_proj_DF: torch.Tensor
    down_bias_D: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The whole decoder. With tied embeddings `lm_head_VD` is `embed_VD` itself."""

    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    lm_head_VD: torch.Tensor


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] | None = None,
) -> DecoderWeights:
    """Load a folder's model.safetensors, or the shards its index names, onto `device` as `dtype`.

    `on_progress` is called after each tensor with the fraction of elements loaded so far; the last call is 1.0.
    Tensors that the architecture does not name are ignored. Raises ModelError, naming the tensor or the file,
    when one is missing, misshapen, quantized or corrupt.
    """
    plan = _LoadPlan(dtype, device)
    weights = plan.decoder(config)
    plan.read(_files_of_tensors(folder), folder, on_progress or (lambda fraction: None))
    return weights


@dataclass(frozen=True)
class _Part:
    """One tensor of the checkpoint and the place it goes to, which is larger only where it broadcasts."""

    name: str
    shape: tuple[int, ...]
    place: torch.Tensor


@dataclass
class _LoadPlan:
    """Allocates buffers and notes which checkpoint tensors fill them; nothing is read until `read`."""

    dtype: torch.dtype
    device: torch.device
    parts: list[_Part] = field(default_factory=list)

    def decoder(self, c: ModelConfig) -> DecoderWeights:
        embed_VD = self.tensor("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        return DecoderWeights(
            embed_VD=embed_VD,
            layers=tuple(self.layer(c, f"model.layers.{i}") for i in range(c.num_layers)),
            norm_D=self.tensor("model.norm.weight", c.hidden_size),
            lm_head_VD=(
                embed_VD
                if c.tie_word_embeddings
                else self.tensor("lm_head.weight", c.vocab_size, c.hidden_size)
            ),
        )

    def layer(self, c: ModelConfig, prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}
        o, down = {f"{attention}.o_proj": c.hidden_size}, {f"{mlp}.down_proj": c.hidden_size}
        return LayerWeights(
            input_norm_D=self.tensor(f"{prefix}.input_layernorm.weight", c.hidden_size),
            qkv_proj_QD=self.stacked("weight", qkv, c.hidden_size),
            qkv_bias_Q=self.stacked("bias", qkv) if c.qkv_bias else None,
            qk_norm_ND=self.qk_norm(c, attention) if c.qk_norm else None,
            o_proj_DA=self.stacked("weight", o, q_size),
            o_bias_D=self.stacked("bias", o) if c.o_bias else None,
            post_attention_norm_D=self.tensor(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
            gate_up_proj_GD=self.stacked("weight", gate_up, c.hidden_size),
            gate_up_bias_G=self.stacked("bias", gate_up) if c.mlp_bias else None,
            down_proj_DF=self.stacked("weight", down, c.intermediate_size),
            down_bias_D=self.stacked("bias", down) if c.mlp_bias else None,
        )

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.parts.append(_Part(name, shape, buffer))
        return buffer

    def stacked(self, kind: str, rows: dict[str, int], *width: int) -> torch.Tensor:
        """One buffer for the `kind` ("weight" or "bias") of several projections, in order, along the first axis."""
        buffer = torch.empty((sum(rows.values()), *width), dtype=self.dtype, device=self.device)
        for (name, num_rows), place in zip(
            rows.items(), torch.split(buffer, list(rows.values())), strict=True
        ):
            self.parts.append(_Part(f"{name}.{kind}", (num_rows, *width), place))
        return buffer

    def qk_norm(self, c: ModelConfig, attention: str) -> torch.Tensor:
        """The norms of q and k repeated per head, so that both are normed in one call."""
        buffer = torch.empty((c.num_heads + c.num_kv_heads, c.head_dim), dtype=self.dtype, device=self.device)
        q_place, k_place = torch.split(buffer, [c.num_heads, c.num_kv_heads])
        self.parts.append(_Part(f"{attention}.q_norm.weight", (c.head_dim,), q_place))
        self.parts.append(_Part(f"{attention}.k_norm.weight", (c.head_dim,), k_place))
        return buffer

    def read(self, files: dict[str, Path], folder: Path, on_progress: Callable[[float], None]) -> None:
        """Check every part against the files' headers, then fill its place, file by file."""
        missing = [part.name for part in self.parts if part.name not in files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"{folder}: the weights lack the tensor {missing[0]}{more}")
        by_file = [
            (path, list(parts))
            for path, parts in groupby(
                sorted(self.parts, key=lambda part: files[part.name]), key=lambda part: files[part.name]
            )
        ]
        for path, parts in by_file:
            with _opened(path) as file:
                for part in parts:
                    _check(file, path, part)
        total, done = sum(part.place.numel() for part in self.parts), 0
        for path, parts in by_file:
            with _opened(path) as file:
                for part in parts:
                    part.place.copy_(file.get_tensor(part.name))
                    done += part.place.numel()
                    on_progress(done / total)


def _check(file: Any, path: Path, part: _Part) -> None:
    tensor_slice = file.get_slice(part.name)
    shape = tuple(tensor_slice.get_shape())
    if shape != part.shape:
        raise ModelError(f"{path}: {part.name} has shape {shape}; config.json makes it {part.shape}")
    if tensor_slice.get_dtype() not in _READABLE_DTYPES:
        raise ModelError(
            f"{path}: {part.name} has dtype {tensor_slice.get_dtype()}; quantized weights are not supported"
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of the checkpoint; like transformers, a single file goes before an index."""
    single, index = folder / _SINGLE_FILE, folder / _INDEX_FILE
    if single.is_file():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise ModelError(
            f"{folder}: has neither {_SINGLE_FILE} nor {_INDEX_FILE} (other weight formats are not read)"
        )
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as e:
        raise ModelError(f"{index}: {e}") from e
    return {name: _shard(index, file_name) for name, file_name in weight_map.items()}


def _shard(index: Path, file_name: str) -> Path:
    if Path(file_name).name != file_name:
        raise ModelError(f"{index}: {file_name!r} is not the name of a file beside it")
    return index.parent / file_name


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; whatever is wrong with it is a ModelError that names it."""
    try:
        opened = safe_open(path, framework="pt")
    except FileNotFoundError as e:
        raise ModelError(f"{path}: {_INDEX_FILE} names this file, but it is missing") from e
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path}: cannot be read as safetensors: {e}") from e
    try:
        with opened as file:
            yield file
    except SafetensorError as e:
        raise ModelError(f"{path}: {e}") from e
