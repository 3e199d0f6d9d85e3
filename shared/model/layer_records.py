"""The layers of a decoder as data: what each is made of, with the names and sizes of its tensors.

A file of `shared/model/models` writes them, and everything else follows them: what is read of a checkpoint, and both
forwards (`shared/model/decoder.py`, `shared/kernels/cpu/src/decoder.cpp`). The router imports this file, so this file
never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


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
class Stacked:
    """Expert `index` of the `count` that share a tensor [count, ...]. A dense weight is [count, inputs, outputs]."""

    index: int
    count: int
    alternates: bool = False
    """Whether outputs are one of gate, one of up, and so on, in place of all of gate first."""


@dataclass(frozen=True)
class Projection:
    """Linear layers of a checkpoint that are computed as one, from `num_inputs` inputs."""

    outputs: dict[str, int]
    """The name of each layer, such as model.layers.0.mlp.up_proj, and its outputs, in the order of the result."""
    num_inputs: int
    has_bias: bool = False
    keeps_type: bool = False
    """Whether it is never quantized: the router of experts."""
    stacked: Stacked | None = None
    """None: its tensors are its own."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention. The outputs of `qkv` are the heads of q, then of k, then of v."""

    qkv: Projection
    qk_norms: tuple[str, str] | None
    """The RMSNorms of q and of k."""
    o: Projection
    sinks: str | None = None
    """A tensor with a logit for each query head, which takes part in its softmax and has no value."""
    norms_whole_qk: bool = False
    """Whether q is normed as a whole, and so is k (OLMoE). Else each head is, with one weight for all heads."""
    window: int | None = None
    """A token sees the last `window` tokens, itself among them. None: all of its sequence."""
    rope: int = 0
    """The index of its rotary embedding in `ModelConfig.ropes`."""
    q_scale: float = 1.0
    """What multiplies scores beside head_dim ** -0.5. The norm of q has it in its weight, so there must be one."""


@dataclass(frozen=True, kw_only=True)
class DenseMlp:
    """down(silu(gate) * up). The outputs of `gate_up` are those of gate, then those of up (arXiv 2002.05202)."""

    gate_up: Projection
    down: Projection
    is_gelu: bool = False
    """Whether it is down(gelu(gate) * up), with GELU by tanh (arXiv 1606.08415). Never of an expert."""

    @property
    def projections(self) -> Iterator[Projection]:
        """In the order in which they are read."""
        yield from (self.gate_up, self.down)


@dataclass(frozen=True, kw_only=True)
class SwigluClamp:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within it (gpt-oss)."""

    limit: float
    alpha: float


@dataclass(frozen=True, kw_only=True)
class ExpertsMlp:
    """A mixture of experts: each token goes through the `top_k` of them for which the router has the largest scores.

    Their outputs are weighted by a softmax over the scores of all experts.
    """

    router: Projection
    """Its outputs are scores, one for each expert."""
    experts: tuple[DenseMlp, ...]
    top_k: int
    is_normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    clamp: SwigluClamp | None = None
    """What stands for silu(gate) * up. None: that itself."""

    @property
    def projections(self) -> Iterator[Projection]:
        """In the order in which they are read."""
        yield self.router
        for expert in self.experts:
            yield from expert.projections


@dataclass(frozen=True, kw_only=True)
class Layer:
    """x + attention(norm(x)), and that as x + mlp(norm(x)). A norm is the name of an RMSNorm's weight.

    An `out_norm` is applied to what attention or mlp gives, before the sum.
    """

    attention_norm: str
    attention: Attention
    attention_out_norm: str | None = None
    mlp_norm: str
    mlp: DenseMlp | ExpertsMlp
    mlp_out_norm: str | None = None
    """The native experts add to the hidden state at once, so a mixture has none."""

    def __post_init__(self) -> None:
        assert isinstance(self.mlp, DenseMlp) or self.mlp_out_norm is None, (
            "no kernel norms a mixture's output"
        )

    @property
    def norms(self) -> Iterator[str]:
        """Of the hidden state."""
        norms = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        yield from (norm for norm in norms if norm is not None)

    def made_for(self, context_length: int) -> Layer:
        """The same, without a window as long as the context."""
        if self.attention.window is None or self.attention.window < context_length:
            return self
        return replace(self, attention=replace(self.attention, window=None))

    @property
    def projections(self) -> Iterator[Projection]:
        """Of the layer, in the order in which they are read."""
        yield from (self.attention.qkv, self.attention.o, *self.mlp.projections)
