"""What a decoder computes with: one object for one forward, so that a fused kernel can take the place of a method.

Shape suffixes are those of `shared.model.decoder`.
"""

from __future__ import annotations

from typing import Protocol

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's angles."""


class Ops(Protocol):
    """The operations of one forward. Only `norm_rope_write` and `attend` know of sequences, pages and KV.

    A result may be a buffer that a later call of the same method overwrites.
    """

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, [T, D]."""
        ...

    def rotary(self, positions_T: torch.Tensor, frequencies_R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """The angles of all tokens, once a forward."""
        ...

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the sum of `x_TD` and the residual stream, and that sum, the residual stream from here on.

        The stream begins with `x_TD` where there is none.
        """
        ...

    def linear(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + bias."""
        ...

    def norm_rope_write(
        self,
        layer: int,
        qkv_TND: torch.Tensor,
        num_kv_heads: int,
        qk_norm_ND: torch.Tensor | None,
        eps: float,
        rotary: Rotary,
    ) -> torch.Tensor:
        """Norm q and k where the model does, rotate both, write k and v to their pages. Returns q [T, H, D]."""
        ...

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Every token's causal attention over its own sequence, [T, H, D]; scores are scaled by D ** -0.5.

        Called once a layer, in order, behind `norm_rope_write` of that layer.
        """
        ...

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, G / 2], gate first."""
        ...
