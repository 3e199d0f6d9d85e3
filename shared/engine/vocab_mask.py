"""Which tokens grammars allow: filled on the host once the step before is committed, applied on the stream."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.sampling_inputs import VocabMask
from shared.scheduling.plan import ScheduleBatch


def must_wait_for_commit(batch: ScheduleBatch) -> bool:
    """True while a token that decides what a grammar of `batch` allows next is still in flight."""
    return any(
        item.req.grammar is not None and item.position is not None and item.position > item.req.output_len
        for item in batch.items
    )


def fill_vocab_mask(batch: ScheduleBatch) -> VocabMask[np.ndarray] | None:
    """The mask of a batch whose sampled positions come next on the host; None where no grammar has a say.

    A request that has ended since it was scheduled, whose step before has failed, or whose grammar is too slow is
    left out: what it samples is dropped.
    """
    sampling = [item for item in batch.items if item.position is not None]
    masked = [
        (entry, item.req.grammar)
        for entry, item in enumerate(sampling)
        if item.req.grammar is not None
        and not item.is_stale
        and not item.req.grammar.is_too_slow
        and item.position == item.req.output_len
    ]
    if not masked:
        return None
    vocab_size = masked[0][1].vocab_size
    allowed_GW = np.full((len(masked), -(-vocab_size // 32)), -1, dtype=np.int32)
    for row, (_, grammar) in enumerate(masked):
        grammar.fill_mask(allowed_GW, row)
    entries_G = np.array([entry for entry, _ in masked], dtype=np.int64)
    return VocabMask(entries_G=entries_G, allowed_GW=allowed_GW)


def apply_vocab_mask(logits_SV: torch.Tensor, mask: VocabMask[torch.Tensor]) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Where `min_new_tokens` or a bias has excluded every allowed token, any allowed token may be drawn: the grammar
    holds in any case.
    """
    device, vocab_size = logits_SV.device, logits_SV.shape[1]
    bits_32 = torch.arange(32, dtype=torch.int32, device=device)
    allowed_GV = ((mask.allowed_GW[:, :, None] >> bits_32) & 1).flatten(1)[:, :vocab_size].bool()
    logits_GV = logits_SV[mask.entries_G].masked_fill(~allowed_GV, -torch.inf)
    nothing_left_G1 = logits_GV.amax(dim=-1, keepdim=True) == -torch.inf
    logits_SV[mask.entries_G] = torch.where(nothing_left_G1 & allowed_GV, 0.0, logits_GV)
