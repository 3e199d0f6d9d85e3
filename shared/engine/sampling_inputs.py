"""What sampling needs from the host, per forward: plain values, collected when a decision is made.

The same classes hold arrays of the host (`HostSampling`) and tensors of the device; `Arrays.map` makes one from the
other. A field that no sequence of the batch asks for is None, and costs nothing further down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shared.scheduling.plan import ScheduleBatch

A = TypeVar("A")


class Arrays(Generic[A]):
    """A record of arrays, of other such records, and of values that are none."""

    __slots__: tuple[str, ...] = ()

    def map(self, to: Callable[[A], object]) -> Any:
        """The same with `to` of each array."""
        return type(self)(**{name: _mapped(getattr(self, name), to) for name in self.__slots__})


_NO_ARRAYS = (type(None), int, tuple)


def _mapped(value: Any, to: Callable[[Any], object]) -> object:
    if isinstance(value, _NO_ARRAYS):
        return value
    return value.map(to) if isinstance(value, Arrays) else to(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawInputs(Arrays[A]):
    """Parameters of the S sequences that sample. A greedy one has temperature 0.

    `uniforms_S` in [0, 1) is what randomness there is: a function of (seed, output position) alone.
    """

    temperatures_S: A
    top_ks_S: A
    top_ps_S: A
    min_ps_S: A
    uniforms_S: A
    needs_filter: bool
    """True when any sequence uses top-k, top-p or min-p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedInputs(Arrays[A]):
    """Sequence `entries_N[n]` may not sample token `token_ids_N[n]` (stop tokens before `min_new_tokens`)."""

    entries_N: A
    token_ids_N: A


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasInputs(Arrays[A]):
    """`values_N[n]` is added to the logit of token `token_ids_N[n]` of sequence `entries_N[n]`; no pair twice."""

    entries_N: A
    token_ids_N: A
    values_N: A


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTokens(Arrays[A]):
    """Slots that are counted anew, and the N tokens of their sequences before the one that is sampled.

    Token `token_ids_N[n]` belongs to slot `token_slots_N[n]`, and counts `in_output_N[n]` times: 1 in the output and
    0 in the prompt.
    """

    slots_A: A
    token_slots_N: A
    token_ids_N: A
    in_output_N: A


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyInputs(Arrays[A]):
    """The P penalized ones of S sequences: `entries_P` is their place among the S, `slots_P` their slot.

    The device counts the tokens of a slot as its sequence samples them. `anew` are the slots whose counts it does
    not have, and `num_slots` says how many slots there are.
    """

    entries_P: A
    slots_P: A
    frequency_P: A
    presence_P: A
    repetition_P: A
    num_slots: int
    anew: KnownTokens[A] | None


@dataclass(frozen=True, slots=True)
class LogprobShare:
    """`num_rows` rows in a row that belong to sequence `owner`, and what it wants of each."""

    owner: int
    num_rows: int
    top_num: int
    num_token_ids: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobInputs(Arrays[A]):
    """N rows of hidden states or logits whose logprobs are wanted; `shares` says whose they are, in order.

    `targets_N` are the tokens that follow, where the host knows them: in a prompt. `token_ids_NM` is padded with
    zeros, `top_num` is the largest of all shares.
    """

    rows_N: A
    targets_N: A | None
    token_ids_NM: A
    top_num: int
    shares: tuple[LogprobShare, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabMask(Arrays[A]):
    """What grammars allow G of the S sequences that sample; `entries_G` is their place among the S.

    Bit i % 32 of word i // 32 of `allowed_GW` (int32) says whether token i may be sampled.
    """

    entries_G: A
    allowed_GW: A


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs(Arrays[A]):
    """What the S sequences that sample in this forward have asked for; nothing at all when all are greedy."""

    draws: DrawInputs[A] | None = None
    """None when every sequence is greedy."""
    masked: MaskedInputs[A] | None = None
    penalties: PenaltyInputs[A] | None = None
    biases: BiasInputs[A] | None = None
    logprobs: LogprobInputs[A] | None = None
    """Of the tokens that are sampled. Rows and owners are places among the S."""
    input_logprobs: LogprobInputs[A] | None = None
    """Of prompt tokens that the forward computes. Rows are indices in T, owners are indices in B."""
    vocab_mask: VocabMask[A] | None = None
    """Filled after everything else, when the step before is committed."""


HostSampling = SamplingInputs[np.ndarray]


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


def adjust_logits(logits_SV: torch.Tensor, inputs: SamplingInputs[torch.Tensor]) -> None:
    """Add biases, and take out what may not be sampled; in place. A batch that asks for neither costs nothing."""
    if (biases := inputs.biases) is not None:
        logits_SV[biases.entries_N, biases.token_ids_N] += biases.values_N
    if inputs.masked is not None:
        logits_SV[inputs.masked.entries_N, inputs.masked.token_ids_N] = -torch.inf
    if inputs.vocab_mask is not None:
        apply_vocab_mask(logits_SV, inputs.vocab_mask)


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
