"""The last sampled token of each row, on the device: how a decode step reads a token that the host has not seen.

SGLang's overlap scheduler (v0.4) plans step n + 1 while step n runs; its inputs exist only on the device.
"""

from __future__ import annotations

import torch


class FutureMap:
    """One token per row of the ReqToTokenPool, and one for padding. The forward stream alone touches it, in order."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.padding_row = num_rows
        """The row that padding of a captured forward writes."""
        self.last_token_R = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def store(self, rows_S: torch.Tensor, token_ids_S: torch.Tensor) -> None:
        """Rows `rows_S` were just sampled."""
        self.last_token_R[rows_S] = token_ids_S

    def resolve(
        self, input_ids_T: torch.Tensor, rows_W: torch.Tensor, token_ids_W: torch.Tensor
    ) -> torch.Tensor:
        """Enter the tokens that the host knows, then read those that it does not: -1 - row stands for a row's."""
        self.store(rows_W, token_ids_W)
        return torch.where(input_ids_T < 0, self.last_token_R[(-1 - input_ids_T).clamp_(min=0)], input_ids_T)
