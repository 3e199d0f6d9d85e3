"""The reference `Ops`: one sequence, K and V kept densely per layer, nothing fused."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from shared.model.experts import multiply
from shared.model.layers import apply_rotary, gelu_mul, rms_norm, rotary_cos_sin, silu_mul
from shared.model.linear import Linear
from shared.model.ops import Rotary
from shared.model.weights import ExpertsWeights


class DenseOps:
    def __init__(self, num_layers: int) -> None:
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        return embedding(input_ids_T, table_VD)

    def rotary(self, positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        return rotary_cos_sin(positions_T, waves_2R, dtype)

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return rms_norm(residual_TD, weight_D, eps), residual_TD

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        return linear.multiply(x_TK)

    def norm_rope_write(
        self,
        layer: int,
        qkv_TND: torch.Tensor,
        num_kv_heads: int,
        qk_norm_ND: torch.Tensor | None,
        eps: float,
        rotary: Rotary,
        window: int | None,
    ) -> torch.Tensor:
        num_heads = qkv_TND.shape[1] - 2 * num_kv_heads
        q_THD, k_TKD, v_TKD = torch.split(qkv_TND, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if qk_norm_ND is not None:
            q_THD = rms_norm(q_THD, qk_norm_ND[:num_heads], eps)
            k_TKD = rms_norm(k_TKD, qk_norm_ND[num_heads:], eps)
        self.keys[layer].append(apply_rotary(k_TKD, *rotary))
        self.values[layer].append(v_TKD)
        return apply_rotary(q_THD, *rotary)

    def attend(
        self, layer: int, q_THD: torch.Tensor, window: int | None, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        group = q_THD.shape[1] // self.keys[layer][0].shape[1]
        k_SHD = torch.cat(self.keys[layer]).repeat_interleave(group, dim=1)
        v_SHD = torch.cat(self.values[layer]).repeat_interleave(group, dim=1)
        num_new, num_seen = q_THD.shape[0], k_SHD.shape[0]
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD.float()) * q_THD.shape[-1] ** -0.5
        hidden_TS = torch.ones(num_new, num_seen, dtype=torch.bool).triu(num_seen - num_new + 1)
        if window is not None:
            hidden_TS |= torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new - window)
        scores_HTS = scores_HTS.masked_fill(hidden_TS, -torch.inf)
        if sinks_H is not None:
            sinks_HTS = sinks_H[:, None, None].float().expand(-1, num_new, 1)
            scores_HTS = torch.cat([scores_HTS, sinks_HTS], -1)
        weights_HTS = scores_HTS.softmax(-1)[..., :num_seen].to(q_THD.dtype)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up_TG)

    def gelu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up_TG)

    def experts(
        self, x_TD: torch.Tensor, scores_TE: torch.Tensor, weights: ExpertsWeights[Linear]
    ) -> torch.Tensor:
        return multiply(x_TD, scores_TE, weights, self)
