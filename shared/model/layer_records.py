"""The layers of a decoder as data: what each is made of, with the names and sizes of its tensors.

A file of `shared/model/models` writes them, and everything else follows them: what is read of a checkpoint, and both
forwards (`shared/model/decoder.py`, `shared/kernels/cpu/src/decoder.cpp`). The router imports this file, so this file
never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """How many heads attention has, and their width in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        """Elements of all heads of q."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all heads of k, and of v."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Projection:
    """Linear layers of a checkpoint that are computed as one, from `num_inputs` inputs."""

    outputs: dict[str, int]
    """The name of each layer, such as model.layers.0.mlp.up_proj, and its outputs, in the order of the result."""
    num_inputs: int
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention over the whole sequence. The outputs of `qkv` are the heads of q, then of k, then of v."""

    qkv: Projection
    qk_norms: tuple[str, str] | None
    """The RMSNorm of each head of q and of k, each of the width of a head."""
    o: Projection


@dataclass(frozen=True, kw_only=True)
class DenseMlp:
    """down(silu(gate) * up). The outputs of `gate_up` are those of gate, then those of up (arXiv 2002.05202)."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True)
class Layer:
    """x + attention(norm(x)), and that as x + mlp(norm(x)). A norm is the name of an RMSNorm's weight.

    An `out_norm` is applied to what attention or mlp gives, before the sum.
    """

    attention_norm: str
    attention: Attention
    attention_out_norm: str | None = None
    mlp_norm: str
    mlp: DenseMlp
    mlp_out_norm: str | None = None

    @property
    def norms(self) -> Iterator[str]:
        """Of the hidden state."""
        norms = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        yield from (norm for norm in norms if norm is not None)

    @property
    def projections(self) -> Iterator[Projection]:
        """Of the layer, in the order in which they are read."""
        yield from (self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down)
