"""Logits to log-probabilities: of the tokens that were chosen, of the likeliest, and of ids asked for.

They are the model's own: log_softmax of the raw logits, before penalties, bias, masks and temperature, so that a
token has the same logprob in every request, in a prompt and in an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from shared.engine.sampling_inputs import Arrays, LogprobInputs, LogprobShare
from shared.protocol.logprobs import Logprobs

MAX_LOGITS_AT_ONCE = 16 << 20
"""Prompt logprobs are computed in blocks of so many float32 logits (64 MiB), however long the chunk is."""


@dataclass(frozen=True, slots=True)
class GatheredLogprobs(Arrays[torch.Tensor]):
    """Logprobs of N rows, on one device. `shares` says whose they are."""

    shares: tuple[LogprobShare, ...]
    chosen_N: torch.Tensor
    top_ids_NK: torch.Tensor
    top_NK: torch.Tensor
    of_token_ids_NM: torch.Tensor

    def by_owner(self) -> dict[int, Logprobs]:
        """Each sequence's share. The tensors must be on the host."""
        chosen = self.chosen_N.numpy().astype("<f4", copy=False)
        top_ids = self.top_ids_NK.numpy().astype("<i4", copy=False)
        top = self.top_NK.numpy().astype("<f4", copy=False)
        of_token_ids = self.of_token_ids_NM.numpy().astype("<f4", copy=False)
        shares: dict[int, Logprobs] = {}
        first = 0
        for share in self.shares:
            rows = slice(first, first + share.num_rows)
            shares[share.owner] = Logprobs(
                chosen[rows].tobytes(),
                np.ascontiguousarray(top_ids[rows, : share.top_num]).tobytes(),
                np.ascontiguousarray(top[rows, : share.top_num]).tobytes(),
                np.ascontiguousarray(of_token_ids[rows, : share.num_token_ids]).tobytes(),
            )
            first += share.num_rows
        return shares


def gather(
    logprobs_NV: torch.Tensor, targets_N: torch.Tensor, inputs: LogprobInputs[torch.Tensor]
) -> GatheredLogprobs:
    """Pick what `inputs` asks for from logprobs of the whole vocabulary."""
    top = logprobs_NV.topk(min(inputs.top_num, logprobs_NV.shape[1]), dim=1)
    return GatheredLogprobs(
        inputs.shares,
        logprobs_NV.gather(1, targets_N[:, None])[:, 0],
        top.indices.int(),
        top.values,
        logprobs_NV.gather(1, inputs.token_ids_NM),
    )


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs of sequences that are about to sample, taken before the sampler changes their logits."""

    inputs: LogprobInputs[torch.Tensor]
    logprobs_NV: torch.Tensor

    @classmethod
    def of(cls, logits_SV: torch.Tensor, inputs: LogprobInputs[torch.Tensor]) -> RawLogprobs:
        """The logprobs of the rows that `inputs` names, as a copy."""
        return cls(inputs, torch.log_softmax(logits_SV[inputs.rows_N], dim=-1))

    def gather(self, token_ids_S: torch.Tensor) -> GatheredLogprobs:
        """Pick what was asked for, now that the sequences have sampled."""
        return gather(self.logprobs_NV, token_ids_S[self.inputs.rows_N], self.inputs)


def prompt_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_ND: torch.Tensor,
    inputs: LogprobInputs[torch.Tensor],
    vocab_size: int,
) -> GatheredLogprobs:
    """Logprobs of the prompt tokens whose hidden states are `hidden_ND`, one for each of `inputs.rows_N`.

    `logits` maps rows of them to float32 logits over `vocab_size` tokens, at most MAX_LOGITS_AT_ONCE at a time.
    """
    assert inputs.targets_N is not None, "the tokens of a prompt are known"
    step = max(1, MAX_LOGITS_AT_ONCE // vocab_size)
    blocks: list[GatheredLogprobs] = []
    for first in range(0, len(hidden_ND), step):
        block = slice(first, first + step)
        logprobs_NV = torch.log_softmax(logits(hidden_ND[block]), dim=-1)
        part = replace(inputs, token_ids_NM=inputs.token_ids_NM[block])
        blocks.append(gather(logprobs_NV, inputs.targets_N[block], part))
    return GatheredLogprobs(
        inputs.shares,
        torch.cat([block.chosen_N for block in blocks]),
        torch.cat([block.top_ids_NK for block in blocks]),
        torch.cat([block.top_NK for block in blocks]),
        torch.cat([block.of_token_ids_NM for block in blocks]),
    )
