"""Penalties and biases: what is added to logits before a token is drawn, for a whole batch at once on the device.

    repetition   l / r where l > 0, l * r elsewhere, for tokens of prompt and output   (Keskar et al. 2019, "CTRL")
    frequency    l - f * (times in the output)
    presence     l - p, for tokens of the output
    logit_bias   l + b

in this order, as in transformers and vLLM.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.on_device import packed_to_device, to_device
from shared.engine.sampling_inputs import BiasInputs, PenaltyInputs


class PenaltyTable:
    """Counts the tokens of each row whose sequence has penalties. Touched on the forward stream only.

    It grows when more rows have penalties than ever before: 5 bytes a row and vocabulary entry, and no
    memory before the first one.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slots: dict[int, int] = {}
        self._num_output_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._is_known_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def apply(self, logits_SV: torch.Tensor, inputs: PenaltyInputs) -> None:
        """Penalize the sequences of `inputs` by the tokens before the one that is sampled; in place."""
        device = logits_SV.device
        slots = self._slots_of(inputs)
        for known in inputs.anew:
            input_ids, output_ids = to_device(known.input_ids, device), to_device(known.output_ids, device)
            self._count_anew(slots[known.at], input_ids, output_ids)
        params = packed_to_device(
            {
                "slots": np.array(slots, dtype=np.int64),
                "entries": inputs.entries_P,
                "frequency": inputs.frequency_P,
                "presence": inputs.presence_P,
                "repetition": inputs.repetition_P,
            },
            device,
        )
        slots_P, entries_P = params["slots"], params["entries"]
        frequency_P1, presence_P1, repetition_P1 = (
            params[name][:, None] for name in ("frequency", "presence", "repetition")
        )
        x_PV = logits_SV[entries_P]
        repeated_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
        x_PV = torch.where(self._is_known_NV[slots_P], repeated_PV, x_PV)
        num_output_PV = self._num_output_NV[slots_P]
        logits_SV[entries_P] = x_PV - frequency_P1 * num_output_PV - presence_P1 * (num_output_PV > 0)

    def count(self, token_ids_S: torch.Tensor, inputs: PenaltyInputs) -> None:
        """Count the tokens that the sequences of `inputs` have sampled."""
        device = token_ids_S.device
        slots_P = to_device(self._slots_of(inputs), device)
        token_ids_P = token_ids_S[to_device(inputs.entries_P, device)]
        self._num_output_NV[slots_P, token_ids_P] += 1  # a row samples once, so no pair occurs twice
        self._is_known_NV[slots_P, token_ids_P] = True

    def _slots_of(self, inputs: PenaltyInputs) -> list[int]:
        slots = [self._slots.setdefault(row, len(self._slots)) for row in inputs.rows_P.tolist()]
        missing = len(self._slots) - len(self._num_output_NV)
        if missing > 0:
            missing = max(missing, len(self._num_output_NV))
            self._num_output_NV = _grown(self._num_output_NV, missing)
            self._is_known_NV = _grown(self._is_known_NV, missing)
        return slots

    def _count_anew(self, slot: int, input_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        self._num_output_NV[slot] = 0
        self._num_output_NV[slot].index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        self._is_known_NV[slot] = self._num_output_NV[slot] > 0
        self._is_known_NV[slot].index_fill_(0, input_ids, True)


def add_biases(logits_SV: torch.Tensor, inputs: BiasInputs) -> None:
    """Add each bias to its logit, in place."""
    device = logits_SV.device
    at = to_device(inputs.entries_N, device), to_device(inputs.token_ids_N, device)
    logits_SV[at] += to_device(inputs.values_N, device, torch.float32)


def _grown(table_NV: torch.Tensor, num_more: int) -> torch.Tensor:
    return torch.cat((table_NV, table_NV.new_zeros(num_more, table_NV.shape[1])))
