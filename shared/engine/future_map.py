"""The last sampled token of each row, on the device: how a decode step reads a token that the host has not seen.

SGLang's overlap scheduler (v0.4) plans step n + 1 while step n runs; its inputs exist only on the device.
"""

from __future__ import annotations

import torch


class FutureMap:
    """One token per row of the ReqToTokenPool. Touched on the forward stream only, so its order is launch order."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.last_token_R = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def store(self, rows_S: torch.Tensor, token_ids_S: torch.Tensor) -> None:
        """Rows `rows_S` were just sampled."""
        self.last_token_R[rows_S] = token_ids_S

    def load(self, rows_B: torch.Tensor) -> torch.Tensor:
        """The last tokens of `rows_B`."""
        return self.last_token_R[rows_B]
