"""A decoder's weights in the layout of the native kernels: linear weights in panels, all others in float32.

A layer is packed as soon as it is read, so loading needs memory for one copy of the weights and one layer. The
embedding table is not packed. It is a view of the mapped file where the file has bfloat16. With tied embeddings the
table is in memory twice: as rows, of which a forward reads a few, and as the panels of the lm_head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from shared.kernels.cpu.decoder import MAX_GROUP, MAX_HEAD_DIM, DecoderDesc, LayerDesc, LinearDesc
from shared.kernels.cpu.library import Team
from shared.kernels.cpu.linear import PanelArena, pack_gate_up, pack_rows
from shared.model.config import ModelConfig
from shared.model.layers import rotary_frequencies
from shared.model.weights import LayerWeights, WeightReader, WeightSource


def native_obstacle(config: ModelConfig) -> str | None:
    """Return why the native kernels cannot compute a model of this shape. None where they can."""
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
    group = config.num_heads // config.num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return f"hidden_size {config.hidden_size} or intermediate_size {config.intermediate_size} is odd"
    return None


@dataclass(frozen=True)
class PackedWeights:
    """A decoder for `NativeDecoder`. `desc` has pointers into the objects in `kept`, which keeps them alive."""

    desc: DecoderDesc
    kept: tuple[object, ...]


def load_packed_weights(
    source: WeightSource,
    config: ModelConfig,
    team: Team,
    *,
    on_progress: Callable[[float], None] | None = None,
) -> PackedWeights:
    """Read and pack the weights of `source`. `WeightReader` describes `on_progress` and the ModelErrors."""
    packer = _Packer(team)
    cpu = torch.device("cpu")
    with WeightReader(source, config, dtype=torch.bfloat16, device=cpu, on_progress=on_progress) as reader:
        embed_VD = reader.embed()
        layers = (LayerDesc * config.num_layers)(*(packer.layer(layer) for layer in reader.layers()))
        norm = packer.floats(reader.norm())
        lm_head = packer.lm_head(config, reader.lm_head_pieces())
    desc = DecoderDesc(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rotary_frequencies=packer.floats(rotary_frequencies(config, cpu)),
        embed=embed_VD.data_ptr(),
        norm=norm,
        lm_head=lm_head,
        layers=ctypes.addressof(layers),
    )
    return PackedWeights(desc, (embed_VD, layers, *packer.kept))


@dataclass
class _Packer:
    """Packs layers into descs, and keeps the objects alive that the descs point to."""

    team: Team
    arena: PanelArena = field(default_factory=PanelArena)
    kept: list[object] = field(default_factory=list)

    def layer(self, layer: LayerWeights) -> LayerDesc:
        gate_FD, up_FD = layer.gate_up_proj_GD.chunk(2)
        gate_up_panels = self.arena.new_panels(*layer.gate_up_proj_GD.shape)
        pack_gate_up(self.team, gate_FD, up_FD, gate_up_panels)
        return LayerDesc(
            input_norm=self.floats(layer.input_norm_D),
            post_attention_norm=self.floats(layer.post_attention_norm_D),
            qk_norm=self.floats(layer.qk_norm_ND),
            qkv=self.linear(layer.qkv_proj_QD, layer.qkv_bias_Q),
            o=self.linear(layer.o_proj_DA, layer.o_bias_D),
            gate_up=self._linear_desc(gate_up_panels, layer.gate_up_proj_GD, layer.gate_up_bias_G),
            down=self.linear(layer.down_proj_DF, layer.down_bias_D),
        )

    def linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> LinearDesc:
        panels = self.arena.new_panels(*weight_NK.shape)
        pack_rows(self.team, weight_NK, panels)
        return self._linear_desc(panels, weight_NK, bias_N)

    def lm_head(self, c: ModelConfig, pieces: Iterator[tuple[int, torch.Tensor]]) -> LinearDesc:
        panels = self.arena.new_panels(c.vocab_size, c.hidden_size)
        for first_row, rows_RD in pieces:
            pack_rows(self.team, rows_RD, panels, first_row)
        self.kept.append(panels)
        return LinearDesc(panels.data_ptr(), None, c.vocab_size, c.hidden_size)

    def floats(self, values: torch.Tensor | None) -> int | None:
        """Return the address of a float32 copy of `values`. None for None."""
        if values is None:
            return None
        copy = values.to(torch.float32, copy=True).contiguous()
        self.kept.append(copy)
        return copy.data_ptr()

    def _linear_desc(
        self, panels: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> LinearDesc:
        self.kept.append(panels)
        return LinearDesc(panels.data_ptr(), self.floats(bias_N), *weight_NK.shape)
