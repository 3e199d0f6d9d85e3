"""What a decoder and its sampling call, in torch, on any device and in any type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from shared.engine.attention import AttentionPlan, TorchAttention
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.penalties import penalize
from shared.engine.sampler import sample
from shared.engine.sampling_inputs import SamplingInputs
from shared.engine.torch_backend import Kernels
from shared.kernels.reference import write_kv
from shared.model.experts import multiply
from shared.model.layers import apply_rotary, gelu_mul, rms_norm, rotary_cos_sin, silu_mul
from shared.model.linear import Linear
from shared.model.ops import Rotary
from shared.model.weights import ExpertsWeights


@dataclass(frozen=True, slots=True)
class TorchOps:
    """The `Ops` of one forward; `attention` was planned for `batch`."""

    batch: ForwardBatch
    attention: AttentionPlan
    kv_NKSD: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """The K and V pages of each layer."""

    def embed(self, input_ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table."""
        return embedding(input_ids_T, table_VD)

    def rotary(self, positions_T: torch.Tensor, waves_2R: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Cosine and sine [T, 1, D]."""
        return rotary_cos_sin(positions_T, waves_2R, dtype)

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm."""
        sum_TD = x_TD if residual_TD is None else residual_TD + x_TD
        return rms_norm(sum_TD, weight_D, eps), sum_TD

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        """One matmul, or one for each group of a quantized weight."""
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
        """Norm and rotation take q and k at once: they are neighbours in the buffer."""
        num_heads = qkv_TND.shape[1] - 2 * num_kv_heads
        qk_TND, v_TKD = torch.split(qkv_TND, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if qk_norm_ND is not None:
            qk_TND = rms_norm(qk_TND, qk_norm_ND, eps)
        q_THD, k_TKD = torch.split(apply_rotary(qk_TND, *rotary), [num_heads, num_kv_heads], dim=1)
        pages_T = self.batch.out_pages_T if window is None else self.batch.out_window_pages_T
        write_kv(*self.kv_NKSD[layer], k_TKD, v_TKD, pages_T, self.batch.out_offsets_T)
        return q_THD

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
        """One expert after the other."""
        return multiply(x_TD, scores_TE, weights, self)


class TorchTokens:
    """The `TokenOps` of torch."""

    penalize = staticmethod(penalize)

    def resolve(self, batch: ForwardBatch, future_map: FutureMap) -> torch.Tensor:
        """As the FutureMap does it."""
        return future_map.resolve(batch.input_ids_T, batch.future_rows_B, batch.future_tokens_B)

    def draw(
        self,
        logits_SV: torch.Tensor,
        inputs: SamplingInputs[torch.Tensor],
        rows_S: torch.Tensor,
        future_map: FutureMap,
    ) -> torch.Tensor:
        """Sample, then store."""
        token_ids_S = sample(logits_SV, inputs)
        future_map.store(rows_S, token_ids_S)
        return token_ids_S


def torch_kernels(device: torch.device) -> Kernels:
    """Torch's, whose numerics name its version, and the GPU or the instruction set that torch uses on this CPU."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return Kernels(
        name="torch",
        numerics=f"torch-{torch.__version__}/{processor}",
        is_exact=False,
        attention=TorchAttention(),
        make_ops=TorchOps,
        tokens=TorchTokens(),
    )
