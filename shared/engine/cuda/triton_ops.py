"""What a decoder and its sampling call, by Triton kernels. Imported on a GPU alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from shared.engine.attention import AttentionPlan
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.sampling_inputs import PenaltyInputs, SamplingInputs
from shared.kernels.triton import adjust, grouped, norm, rope, sampling
from shared.kernels.triton.grouped import Codes, Stack, addresses
from shared.kernels.triton.quantized_linear import LEAST_K, Tile, quantized_linear
from shared.kernels.triton.resolve import resolve
from shared.kernels.triton.silu_mul import gelu_mul, silu_mul
from shared.model.experts import activate, multiply, route
from shared.model.linear import DenseLinear, Linear, QuantizedLinear
from shared.model.ops import Rotary
from shared.model.weights import ExpertsWeights

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TritonOps:
    """The `Ops` of one forward; `attention` was planned for `batch`."""

    batch: ForwardBatch
    attention: AttentionPlan
    kv_NKSD: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """The K and V pages of each layer."""
    product: Product
    """x W^T + bias: cuBLAS's, or one whose sums have one order for any number of rows."""
    stacks: ExpertStacks

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table."""
        return embedding(input_ids_T, table_VD)

    def rotary(self, positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Cosine and sine, [T, D / 2]."""
        return rope.rotary(positions_T, waves_2R, dtype)

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel, which puts the sum into the memory of the residual."""
        return norm.add_norm(x_TD, residual_TD, weight_D, eps)

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        """One matmul, and one kernel before it for the codes of x."""
        if isinstance(linear, DenseLinear):
            return self.product(x_TK, linear.weight_NK, linear.bias_N)
        return multiply_quantized(x_TK, linear)

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
        """One kernel from the projection to pages and queries."""
        pages_T = self.batch.out_pages_T if window is None else self.batch.out_window_pages_T
        to = pages_T, self.batch.out_offsets_T, *self.kv_NKSD[layer]
        return rope.norm_rope_write(qkv_TND, num_kv_heads, qk_norm_ND, eps, *rotary, *to)

    def attend(
        self, layer: int, q_THD: torch.Tensor, window: int | None, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention by the plan of this forward."""
        return self.attention.run(q_THD, *self.kv_NKSD[layer], window, sinks_H)

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """SwiGLU's product."""
        return silu_mul(gate_up_TG)

    def gelu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """GEGLU's product."""
        return gelu_mul(gate_up_TG)

    def experts(
        self, x_TD: torch.Tensor, scores_TE: torch.Tensor, weights: ExpertsWeights[Linear]
    ) -> torch.Tensor:
        """Two grouped products and a sum, or a loop over experts where these cannot be."""
        if not weights.can_be_grouped:
            return multiply(x_TD, scores_TE, weights, self)
        gate_up, down = self.stacks.of(weights)
        chosen_TK, weights_TK = route(scores_TE, weights.top_k, is_normalized=weights.is_normalized)
        num_experts, num_processors = len(weights.experts), self.stacks.num_processors
        tile_rows = grouped.tile_rows(chosen_TK.numel(), num_experts, x_TD.dtype)
        groups = grouped.Groups.of(chosen_TK, num_experts, tile_rows)
        gate_up_PG = grouped.grouped_linear(x_TD, gate_up, groups, weights.top_k, num_processors)
        product_PF = activate(gate_up_PG, weights.clamp, self)
        y_PD = grouped.grouped_linear(product_PF, down, groups, 1, num_processors)
        return grouped.sum_experts(y_PD, weights_TK, chosen_TK)


class ExpertStacks:
    """The addresses of experts' weights on the device, of each mixture that was computed before."""

    def __init__(self, num_processors: int) -> None:
        self.num_processors = num_processors
        self._stacks: dict[int, tuple[ExpertsWeights[Linear], Stack, Stack]] = {}

    def of(self, weights: ExpertsWeights[Linear]) -> tuple[Stack, Stack]:
        """Those of gate with up, and of down, of a mixture that can be grouped."""
        if id(weights) not in self._stacks:
            gate_up = stack_of([expert.gate_up_proj for expert in weights.experts])
            down = stack_of([expert.down_proj for expert in weights.experts])
            self._stacks[id(weights)] = weights, gate_up, down
        return self._stacks[id(weights)][1:]


def stack_of(linears: Sequence[Linear]) -> Stack:
    """Of layers that have one shape and are quantized in one way."""
    biases = [linear.bias_N for linear in linears if linear.bias_N is not None]
    of_all = addresses(biases) if biases else None
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    if dense:
        n, d = dense[0].weight_NK.shape
        return Stack(addresses([linear.weight_NK for linear in dense]), of_all, (n, d), None, linears)
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    zeros = [linear.zeros_NG for linear in quantized if linear.zeros_NG is not None]
    first = quantized[0]
    codes = Codes(
        addresses([linear.scales_NG for linear in quantized]),
        addresses(zeros) if zeros else None,
        first.bits,
        first.group_size,
        first.is_float,
        first.is_weight_only,
    )
    return Stack(addresses([linear.codes_NK for linear in quantized]), of_all, first.shape, codes, linears)


def multiply_quantized(x_TK: torch.Tensor, linear: QuantizedLinear, tile: Tile | None = None) -> torch.Tensor:
    """x W^T + bias. Torch multiplies FP4, and where groups fit no matrix instruction, as in no model of a hub."""
    is_fp4 = linear.is_float and linear.bits == 4
    if is_fp4 or linear.group_size % LEAST_K or linear.is_packed != (linear.bits == 4):
        return linear.multiply(x_TK)
    of_groups = linear.scales_NG, linear.zeros_NG, linear.order_K
    return quantized_linear(
        x_TK,
        linear.codes_NK,
        *of_groups,
        linear.bias_N,
        bits=linear.bits,
        is_weight_only=linear.is_weight_only,
        is_float=linear.is_float,
        tile=tile,
    )


@dataclass(frozen=True, slots=True)
class TritonTokens:
    """What a batch does with tokens before and behind the layers, in at most seven kernels.

    What is drawn depends on a row's logits and parameters alone. `block` and `few` decide about time, not results.
    """

    block: int = sampling.BLOCK
    few: int = sampling.FEW

    def resolve(self, batch: ForwardBatch, future_map: FutureMap) -> torch.Tensor:
        """One kernel."""
        writes = batch.future_rows_B, batch.future_tokens_B
        return resolve(batch.input_ids_T, *writes, future_map.last_token_R)

    def penalize(
        self,
        logits_SV: torch.Tensor,
        inputs: PenaltyInputs[torch.Tensor],
        num_output_NV: torch.Tensor,
        is_known_NV: torch.Tensor,
    ) -> None:
        """One kernel."""
        of_rows = inputs.entries_P, inputs.slots_P
        params = inputs.frequency_P, inputs.presence_P, inputs.repetition_P
        adjust.penalize(logits_SV, *of_rows, *params, num_output_NV, is_known_NV)

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """Biases and vocab masks where a row has one, then the kernels that draw and store."""
        biases, masked, mask = inputs.biases, inputs.masked, inputs.vocab_mask
        if biases is not None or masked is not None:
            adjust.add_biases(
                logits_SV,
                None if biases is None else (biases.entries_N, biases.token_ids_N, biases.values_N),
                None if masked is None else (masked.entries_N, masked.token_ids_N),
            )
        if mask is not None:
            adjust.apply_vocab_mask(logits_SV, mask.entries_G, mask.allowed_GW, self.block)
        params, draws = None, inputs.draws
        if draws is not None:
            params = sampling.Params(
                draws.temperatures_S, draws.top_ks_S, draws.top_ps_S, draws.min_ps_S, draws.uniforms_S
            )
        to = rows_S, future_map.last_token_R
        return sampling.sample(logits_SV, params, *to, self.block, self.few)
