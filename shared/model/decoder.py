"""The decoder in Python: the layers that a `ModelConfig` describes, one after another.

A forward works on one flat token axis: the tokens of all Reqs of a batch, concatenated, with their positions. Only
the `Ops` of a forward know which token belongs to which Req, where K and V are kept and how attention runs.

Shape suffixes: T tokens of the batch, B rows that need logits, D hidden size (head_dim after a heads axis), H query
heads, N query, key and value heads side by side, Q their elements, G gate and up side by side, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.model.config import ModelConfig
from shared.model.linear import Linear
from shared.model.ops import Ops, Rotary
from shared.model.rotary import rotary_waves
from shared.model.weight_source import WeightSource
from shared.model.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    MlpWeights,
    load_weights,
)


class Decoder:
    """A loaded model. It keeps weights and no state: the result of a call depends on its arguments only.

    Callers run within `torch.inference_mode`.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        embed_VD = weights.embed_VD
        self.embed_scale = torch.tensor(config.embed_scale, dtype=embed_VD.dtype).item()
        self.rotary_waves = [rotary_waves(rope, config.head_dim, embed_VD.device) for rope in config.ropes]

    @classmethod
    def load(
        cls,
        source: WeightSource,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None] | None = None,
    ) -> Decoder:
        """Load the weights of `source`. `WeightReader` describes `on_progress` and the ModelErrors."""
        return cls(config, load_weights(source, config, dtype=dtype, device=device, on_progress=on_progress))

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        ops: Ops,
        out_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, D] after the last layer, in `out_TD` if it is given.

        `logits` applies the final norm to rows of them.
        """
        eps = self.config.rms_norm_eps
        x_TD, residual_TD = ops.embed(input_ids_T, self.weights.embed_VD), None
        if self.embed_scale != 1.0:
            x_TD = x_TD * self.embed_scale
        rotaries = [ops.rotary(positions_T, waves_2R, x_TD.dtype) for waves_2R in self.rotary_waves]
        for i, layer in enumerate(self.weights.layers):
            normed_TD, residual_TD = ops.add_norm(x_TD, residual_TD, layer.attention_norm_D, eps)
            x_TD = self._attention(i, layer.attention, normed_TD, rotaries[layer.attention.rope], ops)
            x_TD = self._normed(x_TD, layer.attention_out_norm_D, ops)
            normed_TD, residual_TD = ops.add_norm(x_TD, residual_TD, layer.mlp_norm_D, eps)
            x_TD = self._normed(_mlp(layer.mlp, normed_TD, ops), layer.mlp_out_norm_D, ops)
        assert residual_TD is not None, "the model has no layers"
        return torch.add(residual_TD, x_TD, out=out_TD)

    def logits(self, hidden_BD: torch.Tensor, ops: Ops, out_BV: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [B, V], float32, of rows of the result of `forward`, in `out_BV` if it is given."""
        normed_BD, _ = ops.add_norm(hidden_BD, None, self.weights.norm_D, self.config.rms_norm_eps)
        logits_BV = ops.linear(normed_BD, self.weights.lm_head)
        return logits_BV.float() if out_BV is None else out_BV.copy_(logits_BV)

    def _normed(self, x_TD: torch.Tensor, weight_D: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """`x_TD` where there is no weight."""
        return x_TD if weight_D is None else ops.add_norm(x_TD, None, weight_D, self.config.rms_norm_eps)[0]

    def _attention(
        self, i: int, weights: AttentionWeights[Linear], x_TD: torch.Tensor, rotary: Rotary, ops: Ops
    ) -> torch.Tensor:
        c = self.config
        qkv_TQ, qk_norm_ND = ops.linear(x_TD, weights.qkv_proj), weights.qk_norm_ND
        if weights.norms_whole_qk and qk_norm_ND is not None:
            self._norm_whole_qk(qkv_TQ, qk_norm_ND, ops)
            qk_norm_ND = None
        qkv_TND = qkv_TQ.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        norm = qk_norm_ND, c.rms_norm_eps
        q_THD = ops.norm_rope_write(i, qkv_TND, c.num_kv_heads, *norm, rotary, weights.window)
        attended_THD = ops.attend(i, q_THD, weights.window, weights.sinks_H)
        return ops.linear(attended_THD.flatten(1), weights.o_proj)

    def _norm_whole_qk(self, qkv_TQ: torch.Tensor, weight_ND: torch.Tensor, ops: Ops) -> None:
        """Norm q of all heads as one row, in place, and so k."""
        sizes = [n * self.config.head_dim for n in (self.config.num_heads, self.config.num_kv_heads)]
        parts = torch.split(qkv_TQ[:, : sum(sizes)], sizes, dim=1)
        for x_TQ, weight_Q in zip(parts, torch.split(weight_ND.flatten(), sizes), strict=True):
            x_TQ.copy_(ops.add_norm(x_TQ.contiguous(), None, weight_Q, self.config.rms_norm_eps)[0])


def _mlp(weights: MlpWeights[Linear] | ExpertsWeights[Linear], x_TD: torch.Tensor, ops: Ops) -> torch.Tensor:
    if isinstance(weights, ExpertsWeights):
        return ops.experts(x_TD, ops.linear(x_TD, weights.router), weights)
    gate_up_TG = ops.linear(x_TD, weights.gate_up_proj)
    gated_TF = ops.gelu_mul(gate_up_TG) if weights.is_gelu else ops.silu_mul(gate_up_TG)
    return ops.linear(gated_TF, weights.down_proj)
