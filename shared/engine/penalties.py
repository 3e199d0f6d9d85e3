"""Penalties: what tokens so far add to logits before a token is drawn, for a whole batch at once on the device.

    repetition   l / r where l > 0, l * r elsewhere, for tokens of prompt and output   (Keskar et al. 2019, "CTRL")
    frequency    l - f * (times in the output)
    presence     l - p, for tokens of the output

in this order, and before biases (`sampling_inputs.adjust_logits`), as in transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.engine.sampling_inputs import KnownTokens, PenaltyInputs

Penalize = Callable[[torch.Tensor, PenaltyInputs[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""(logits [S, V], penalties, how often each slot's output has a token, whether a slot has a token), in place."""


class PenaltyTable:
    """Counts the tokens of each slot, one for each row whose sequences have had penalties.

    Touched on the forward stream only. It grows when more rows have penalties than ever before: 5 bytes a slot and
    vocabulary entry, and no memory before the first one.
    """

    def __init__(self, vocab_size: int, device: torch.device, penalize: Penalize) -> None:
        self._penalize = penalize
        self._num_output_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._is_known_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def apply(self, logits_SV: torch.Tensor, inputs: PenaltyInputs[torch.Tensor]) -> None:
        """Penalize the sequences of `inputs` by the tokens before the one that is sampled; in place."""
        self._grow(inputs.num_slots)
        if inputs.anew is not None:
            self._count_anew(inputs.anew)
        self._penalize(logits_SV, inputs, self._num_output_NV, self._is_known_NV)

    def count(self, token_ids_S: torch.Tensor, inputs: PenaltyInputs[torch.Tensor]) -> None:
        """Count the tokens that the sequences of `inputs` have sampled."""
        at = inputs.slots_P, token_ids_S[inputs.entries_P]
        self._num_output_NV[at] += 1  # a slot samples once, so no pair occurs twice
        self._is_known_NV[at] = True

    def _grow(self, num_slots: int) -> None:
        num_now = len(self._num_output_NV)
        if num_slots > num_now:
            num_more = max(num_slots - num_now, num_now)
            self._num_output_NV = _grown(self._num_output_NV, num_more)
            self._is_known_NV = _grown(self._is_known_NV, num_more)

    def _count_anew(self, known: KnownTokens[torch.Tensor]) -> None:
        self._num_output_NV[known.slots_A] = 0
        self._is_known_NV[known.slots_A] = False
        at = known.token_slots_N, known.token_ids_N
        self._num_output_NV.index_put_(at, known.in_output_N, accumulate=True)
        self._is_known_NV[at] = True


def penalize(
    logits_SV: torch.Tensor,
    inputs: PenaltyInputs[torch.Tensor],
    num_output_NV: torch.Tensor,
    is_known_NV: torch.Tensor,
) -> None:
    """Penalize by torch operations, on any device."""
    x_PV = logits_SV[inputs.entries_P]
    repetition_P1 = inputs.repetition_P[:, None]
    repeated_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
    x_PV = torch.where(is_known_NV[inputs.slots_P], repeated_PV, x_PV)
    num_output_PV = num_output_NV[inputs.slots_P]
    for_each_PV = inputs.frequency_P[:, None] * num_output_PV
    logits_SV[inputs.entries_P] = x_PV - for_each_PV - inputs.presence_P[:, None] * (num_output_PV > 0)


def _grown(table_NV: torch.Tensor, num_more: int) -> torch.Tensor:
    return torch.cat((table_NV, table_NV.new_zeros(num_more, table_NV.shape[1])))
