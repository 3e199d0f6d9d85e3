"""The operations of a decoder, so that a fused kernel can implement a method.

Shape suffixes are those of `shared.model.decoder`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shared.model.linear import Linear
from shared.model.weights import ExpertsWeights

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of the angles of each token."""


class Ops(Protocol):
    """The operations of one forward. Only `norm_rope_write` and `attend` deal with sequences, pages and KV.

    A result may be a buffer that a later call of the same method overwrites, but not one of `rotary`.
    """

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return rows of the embedding table, [T, D]."""
        ...

    def rotary(self, positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Return the angles of all tokens. Called once in a forward for each rotary embedding."""
        ...

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the RMSNorm of x + residual, and x + residual, which is the new residual stream.

        Without a residual (None) the residual stream begins with `x_TD`. The sum may be in the memory of
        `residual_TD`.
        """
        ...

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Return x W^T + bias."""
        ...

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
        """Norm (where `qk_norm_ND` is given) and rotate q and k, write k and v to their pages, return q [T, H, D].

        A layer with a window may have pages of its own.
        """
        ...

    def attend(
        self, layer: int, q_THD: torch.Tensor, window: int | None, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the causal attention of every token over its sequence, [T, H, D]. Scores are scaled by D ** -0.5.

        With a window a token sees the last `window` tokens, itself among them. Sinks take part in a head's softmax.
        Called once for each layer, after `norm_rope_write` of that layer.
        """
        ...

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [T, G / 2], gate first."""
        ...

    def gelu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up, [T, G / 2], gate first, with GELU's approximation by tanh."""
        ...

    def experts(
        self, x_TD: torch.Tensor, scores_TE: torch.Tensor, weights: ExpertsWeights[Linear]
    ) -> torch.Tensor:
        """Return what `shared.model.experts.multiply` does, [T, D], for the scores of the router."""
        ...
