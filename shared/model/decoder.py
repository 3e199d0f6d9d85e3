"""The dense decoder family (Llama, Mistral, Qwen2, Qwen3), read from top to bottom.

A forward works on one flat token axis: the tokens of all Reqs of a batch, concatenated, with their positions. Which
token belongs to which Req, where K and V are kept and how attention runs is known only to `attend`.

Shape suffixes: T tokens of the batch, B rows whose logits are wanted, D hidden size (head_dim after a heads axis),
H query heads, K KV heads, N several of both side by side, G gate and up side by side, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from shared.model.config import ModelConfig
from shared.model.layers import apply_rotary, rms_norm, rotary_cos_sin, rotary_frequencies, silu_mul
from shared.model.weights import DecoderWeights, LayerWeights, load_weights


class Attend(Protocol):
    """Keeps one layer's new K and V, then returns every token's causal attention over its own Req.

    q_THD and k_TKD carry their rotation already. All three may be strided views; scores are scaled by
    head_dim ** -0.5. The result is o_THD in the same dtype.
    """

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, /
    ) -> torch.Tensor:
        """Called once per layer and forward, in order, on the forward's stream."""
        ...


class Decoder:
    """A loaded model. It keeps weights and nothing else: every call is a function of its arguments.

    Callers hold `torch.inference_mode`.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.rotary_frequencies = rotary_frequencies(config, weights.embed_VD.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None] | None = None,
    ) -> Decoder:
        """Load a folder's weights; see `load_weights` for progress and for the ModelErrors raised."""
        return cls(config, load_weights(folder, config, dtype=dtype, device=device, on_progress=on_progress))

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, D] after the last layer, before the final norm, which `logits` applies to its rows.

        `attend` is called once per layer, in order.
        """
        hidden_TD = embedding(input_ids_T, self.weights.embed_VD)
        rotary = rotary_cos_sin(positions_T, self.rotary_frequencies, hidden_TD.dtype)
        for i, layer in enumerate(self.weights.layers):
            normed_TD = rms_norm(hidden_TD, layer.input_norm_D, self.config.rms_norm_eps)
            hidden_TD = hidden_TD + self._attention(i, layer, normed_TD, rotary, attend)
            normed_TD = rms_norm(hidden_TD, layer.post_attention_norm_D, self.config.rms_norm_eps)
            hidden_TD = hidden_TD + _mlp(layer, normed_TD)
        return hidden_TD

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] in float32 of rows of `forward`'s result."""
        normed_BD = rms_norm(hidden_BD, self.weights.norm_D, self.config.rms_norm_eps)
        return linear(normed_BD, self.weights.lm_head_VD).float()

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        x_TD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv_TQ = linear(x_TD, layer.qkv_proj_QD, layer.qkv_bias_Q)
        qkv_TND = qkv_TQ.view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
        # q and k are neighbours in the buffer, so norm and rotation take both at once.
        qk_TND, v_TKD = torch.split(qkv_TND, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.qk_norm_ND is not None:
            qk_TND = rms_norm(qk_TND, layer.qk_norm_ND, self.config.rms_norm_eps)
        q_THD, k_TKD = torch.split(apply_rotary(qk_TND, *rotary), [num_heads, num_kv_heads], dim=1)
        o_THD = attend(i, q_THD, k_TKD, v_TKD)
        return linear(o_THD.flatten(1), layer.o_proj_DA, layer.o_bias_D)


def _mlp(layer: LayerWeights, x_TD: torch.Tensor) -> torch.Tensor:
    gate_up_TG = linear(x_TD, layer.gate_up_proj_GD, layer.gate_up_bias_G)
    return linear(silu_mul(gate_up_TG), layer.down_proj_DF, layer.down_bias_D)
