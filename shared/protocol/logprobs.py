"""Log-probabilities on the wire: what a request asks for, and what nodes answer.

They are the model's own, log_softmax of its raw logits: before penalties, bias, masks and temperature.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS_LOGPROB = 1024
OUTPUTS_ONLY = -1
MAX_INPUT_LOGPROBS = 1 << 19
"""Most numbers (4 bytes each) about one prompt. One TokenEntry has them all, and the router writes them as JSON:
15 MiB in half a second for 511 tokens with 1,024 ids each."""


class LogprobParams(msgspec.Struct, frozen=True, array_like=True):
    """Beside each token's own logprob: those of the `top_num` likeliest tokens, and of `token_ids`.

    `start_len` is the first prompt position that is asked for too; -1: output tokens only.
    """

    start_len: int = OUTPUTS_ONLY
    top_num: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def numbers_per_token(self) -> int:
        """Its own logprob, the likeliest with their ids, and those of `token_ids`; each takes 4 bytes."""
        return 1 + 2 * self.top_num + len(self.token_ids)

    def num_matchable(self, num_input_ids: int) -> int:
        """Tokens of a prompt that may come from a cache: a position whose logprob is wanted has to be computed."""
        return num_input_ids - 1 if self.start_len < 0 else min(self.start_len, num_input_ids - 1)

    def num_input_logprobs(self, num_input_ids: int) -> int:
        """Numbers about a prompt; at most MAX_INPUT_LOGPROBS of them are served."""
        num_wanted = 0 if self.start_len < 0 else max(num_input_ids - 1 - self.start_len, 0)
        return num_wanted * self.numbers_per_token


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token: its own, the likeliest as (logprob, id) from the likeliest on, and those of the ids asked for."""

    logprob: float
    top: tuple[tuple[float, int], ...] = ()
    of_token_ids: tuple[float, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of N tokens in a row, packed little-endian, since it may be a long prompt.

    `chosen` is float32 [N], `top_ids` int32 [N, top_num], `top` float32 [N, top_num], `of_token_ids` float32
    [N, number of token ids asked for].
    """

    chosen: bytes
    top_ids: bytes = b""
    top: bytes = b""
    of_token_ids: bytes = b""

    def __post_init__(self) -> None:
        """Raises ValueError, and so refuses a frame, when the lengths of the parts do not fit together."""
        parts = (self.chosen, self.top_ids, self.top, self.of_token_ids)
        row_nbytes = 4 * self.num_tokens
        whole = all(len(part) % row_nbytes == 0 if row_nbytes else not part for part in parts)
        if not whole or len(self.top) != len(self.top_ids):
            raise ValueError(f"logprobs with parts of {[len(part) for part in parts]} bytes")

    @property
    def num_tokens(self) -> int:
        """N, from the length of `chosen`."""
        return len(self.chosen) // 4

    def unpack(self) -> list[TokenLogprobs]:
        """One record for each token."""
        n = self.num_tokens
        top_ids: Sequence[tuple[int, ...]] = _rows(self.top_ids, "i", n)
        top = _rows(self.top, "f", n)
        of_token_ids = _rows(self.of_token_ids, "f", n)
        return [
            TokenLogprobs(own, tuple(zip(top[i], top_ids[i], strict=True)), of_token_ids[i])
            for i, (own,) in enumerate(_rows(self.chosen, "f", n))
        ]

    def followed_by(self, more: Logprobs) -> Logprobs:
        """The logprobs of these tokens and then of `more`."""
        return Logprobs(
            self.chosen + more.chosen,
            self.top_ids + more.top_ids,
            self.top + more.top,
            self.of_token_ids + more.of_token_ids,
        )


def _rows(packed: bytes, kind: str, num_rows: int) -> Sequence[tuple[Any, ...]]:
    width = len(packed) // (4 * num_rows) if num_rows else 0
    row = struct.Struct(f"<{width}{kind}")
    return list(row.iter_unpack(packed)) if width else [()] * num_rows
