"""The reference `attend`: one Req, K and V kept densely per layer."""

from __future__ import annotations

import torch


class DenseAttend:
    def __init__(self, num_layers: int) -> None:
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        self.keys[layer].append(k_TKD)
        self.values[layer].append(v_TKD)
        group = q_THD.shape[1] // k_TKD.shape[1]
        k_SHD = torch.cat(self.keys[layer]).repeat_interleave(group, dim=1)
        v_SHD = torch.cat(self.values[layer]).repeat_interleave(group, dim=1)
        num_new, num_seen = q_THD.shape[0], k_SHD.shape[0]
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD.float()) * q_THD.shape[-1] ** -0.5
        future_TS = torch.ones(num_new, num_seen, dtype=torch.bool).triu(num_seen - num_new + 1)
        weights_HTS = scores_HTS.masked_fill(future_TS, -torch.inf).softmax(-1).to(q_THD.dtype)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
