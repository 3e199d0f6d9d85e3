"""What sampling needs from the host, per forward: plain values, collected when a decision is made.

A field that no sequence of the batch asks for is None, and costs nothing further down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.plan import ScheduledReq


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasInputs:
    """`values_N[n]` is added to the logit of token `token_ids_N[n]` of sequence `entries_N[n]`; no pair twice."""

    entries_N: np.ndarray
    token_ids_N: np.ndarray
    values_N: np.ndarray


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of one sequence before the one that is sampled; `at` is its place among the penalized."""

    at: int
    input_ids: np.ndarray
    output_ids: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyInputs:
    """The P penalized ones of S sequences: `entries_P` is their place among the S, `rows_P` the row they hold.

    The device counts the tokens of a row as it samples them. `anew` are the rows whose counts it does not have.
    """

    entries_P: np.ndarray
    rows_P: np.ndarray
    frequency_P: np.ndarray
    presence_P: np.ndarray
    repetition_P: np.ndarray
    anew: tuple[KnownTokens, ...]


@dataclass(frozen=True, slots=True)
class LogprobShare:
    """`num_rows` rows in a row that belong to sequence `owner`, and what it wants of each."""

    owner: int
    num_rows: int
    top_num: int
    num_token_ids: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobInputs:
    """N rows of hidden states or logits whose logprobs are wanted; `shares` says whose they are, in order.

    `targets_N` are the tokens that follow, where the host knows them: in a prompt. `token_ids_NM` is padded with
    zeros, `top_num` is the largest of all shares.
    """

    rows_N: np.ndarray
    targets_N: np.ndarray | None
    token_ids_NM: np.ndarray
    top_num: int
    shares: tuple[LogprobShare, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs:
    """Parameters of the S sequences that sample in this forward, as host arrays of length S.

    `uniforms` in [0, 1) is what randomness there is: a function of (seed, output position) alone.
    `masked_ids[i]` may not be sampled by sequence i (stop tokens before `min_new_tokens`).
    """

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    uniforms: np.ndarray
    masked_ids: tuple[tuple[int, ...], ...]
    all_greedy: bool
    needs_filter: bool
    """True when any sequence uses top-k, top-p or min-p."""
    penalties: PenaltyInputs | None = None
    biases: BiasInputs | None = None
    logprobs: LogprobInputs | None = None


class CountedRows:
    """Which sequence's tokens the device has counted in each row, and up to which output position.

    A step that goes on where the last one of that row stopped needs to send nothing. Any other (the first of a
    row, after a transfer, a retraction or a re-prefill) sends the known tokens, which the device counts
    anew. No token of the row is in flight then, so the counts are exact.
    """

    def __init__(self) -> None:
        self._next: dict[int, tuple[ReqKey, int, int]] = {}

    def go_on(self, item: ScheduledReq) -> bool:
        """Note that `item` samples; False when the tokens before it have to be counted anew."""
        assert item.req.kv is not None
        assert item.position is not None
        row, position = item.req.kv.row, item.position
        counted = self._next.get(row) == (item.req.key, item.generation, position)
        self._next[row] = (item.req.key, item.generation, position + 1)
        assert counted or position == item.req.output_len, (
            f"{item.req.key}: tokens up to position {position} are to be counted, {item.req.output_len} are known"
        )
        return counted


def sampling_inputs(
    items: Sequence[ScheduledReq], eos_token_ids: frozenset[int], counted_rows: CountedRows
) -> SamplingInputs:
    """The parameters of `items`, all of which sample."""
    params = [item.req.params for item in items]
    positions = [item.position or 0 for item in items]
    return SamplingInputs(
        temperatures=np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
        top_ks=np.array([p.top_k for p in params], dtype=np.int64),
        top_ps=np.array([p.top_p for p in params], dtype=np.float32),
        min_ps=np.array([p.min_p for p in params], dtype=np.float32),
        uniforms=np.array(
            [uniform(p.seed, position) for p, position in zip(params, positions, strict=True)],
            dtype=np.float64,
        ),
        masked_ids=tuple(
            _masked_ids(p, position, eos_token_ids) for p, position in zip(params, positions, strict=True)
        ),
        all_greedy=all(p.is_greedy for p in params),
        needs_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if not p.is_greedy),
        penalties=_penalties(items, counted_rows),
        biases=_biases(params),
        logprobs=_output_logprobs(params),
    )


def input_logprobs(items: Sequence[ScheduledReq]) -> LogprobInputs | None:
    """The prompt logprobs that an extend of `items` brings: that of the token at i + 1 comes from position i.

    They belong to output position 0: a request that resumes after it brings none.
    """
    rows: list[int] = []
    targets: list[int] = []
    shares: list[tuple[int, int, LogprobParams]] = []
    first_row = 0
    for b, item in enumerate(items):
        req, start, end = item.req, item.start, item.start + item.length
        wanted_from = req.input_logprobs_from
        if wanted_from is not None:
            first, last = max(start, wanted_from), min(end, req.num_input_ids - 1)
            if first < last:
                rows += range(first_row + first - start, first_row + last - start)
                targets += req.ids[first + 1 : last + 1]
                assert req.params.logprobs is not None
                shares.append((b, last - first, req.params.logprobs))
        first_row += item.length
    return _logprobs(rows, targets, shares) if rows else None


def _masked_ids(params: SamplingParams, position: int, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    if position >= params.min_new_tokens:
        return ()
    eos = () if params.ignore_eos else sorted(eos_token_ids)
    return (*params.stop_token_ids, *eos)


def _penalties(items: Sequence[ScheduledReq], counted_rows: CountedRows) -> PenaltyInputs | None:
    entries = [i for i, item in enumerate(items) if item.req.params.has_penalties]
    if not entries:
        return None
    penalized = [items[i].req for i in entries]
    anew = [at for at, i in enumerate(entries) if not counted_rows.go_on(items[i])]
    params = [req.params for req in penalized]
    return PenaltyInputs(
        entries_P=np.array(entries, dtype=np.int64),
        rows_P=np.array([req.kv.row for req in penalized if req.kv is not None], dtype=np.int64),
        frequency_P=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        presence_P=np.array([p.presence_penalty for p in params], dtype=np.float32),
        repetition_P=np.array([p.repetition_penalty for p in params], dtype=np.float32),
        anew=tuple(
            KnownTokens(
                at,
                np.array(penalized[at].ids[: penalized[at].num_input_ids], dtype=np.int64),
                np.array(penalized[at].ids[penalized[at].num_input_ids :], dtype=np.int64),
            )
            for at in anew
        ),
    )


def _biases(params: Sequence[SamplingParams]) -> BiasInputs | None:
    biases = [(i, bias.token_id, bias.bias) for i, p in enumerate(params) for bias in p.logit_bias]
    if not biases:
        return None
    entries, token_ids, values = zip(*biases, strict=True)
    return BiasInputs(
        entries_N=np.array(entries, dtype=np.int64),
        token_ids_N=np.array(token_ids, dtype=np.int64),
        values_N=np.array(values, dtype=np.float32),
    )


def _output_logprobs(params: Sequence[SamplingParams]) -> LogprobInputs | None:
    shares = [(i, 1, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    return _logprobs([i for i, _, _ in shares], None, shares) if shares else None


def _logprobs(
    rows: Sequence[int], targets: Sequence[int] | None, shares: Sequence[tuple[int, int, LogprobParams]]
) -> LogprobInputs:
    most_ids = max(len(wanted.token_ids) for _, _, wanted in shares)
    token_ids = np.zeros((len(rows), most_ids), dtype=np.int64)
    at = 0
    for _, num_rows, wanted in shares:
        token_ids[at : at + num_rows, : len(wanted.token_ids)] = wanted.token_ids
        at += num_rows
    return LogprobInputs(
        rows_N=np.array(rows, dtype=np.int64),
        targets_N=None if targets is None else np.array(targets, dtype=np.int64),
        token_ids_NM=token_ids,
        top_num=max(wanted.top_num for _, _, wanted in shares),
        shares=tuple(LogprobShare(b, n, w.top_num, len(w.token_ids)) for b, n, w in shares),
    )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: two rounds of SplitMix64 (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    x = _mix(((seed & mask) + 0x9E3779B97F4A7C15) & mask)
    x = _mix((x ^ ((position + 1) * 0xD1B54A32D192ED03)) & mask)
    return (x >> 11) * 2.0**-53


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
