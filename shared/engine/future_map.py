"""The last sampled token of each row, on the device: how a decode step reads a token that the host has not seen.

SGLang's overlap scheduler (v0.4) plans step n + 1 while step n runs; its inputs exist only on the device.
"""

from __future__ import annotations

import torch

from shared.engine.model_worker_batch import ModelWorkerBatch


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


def resolve_forward_inputs(
    batch: ModelWorkerBatch, future_map: FutureMap, device: torch.device
) -> torch.Tensor:
    """The token ids that this forward computes, int64 [T], on the device.

    Runs at forward entry, on the forward stream: prompt ids are copied only now (the deferred host-to-device
    copy), tokens from prefill nodes enter the FutureMap, and the inputs of a decode step are read from it.
    """
    if batch.future_writes:
        rows, tokens = zip(*batch.future_writes, strict=True)
        future_map.store(to_device(rows, device), to_device(tokens, device))
    if batch.num_decodes == 0:
        return to_device(batch.input_ids, device)
    last_sampled = future_map.load(to_device(batch.rows_B[-batch.num_decodes :], device))
    if len(batch.input_ids) == 0:
        return last_sampled
    return torch.cat([to_device(batch.input_ids, device), last_sampled])


def to_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Host values as a tensor on `device`; on a GPU through pinned memory, without waiting for the copy."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host
