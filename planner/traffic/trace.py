"""A trace: when requests came, how long their prompts and answers were, and which prefixes they shared. Never text.

A trace names each block of so many prompt tokens by an id; equal ids mean equal blocks with equal prefixes. Here a
block becomes that many made-up tokens: its id, then a filler, so that prompts share a prefix where their ids do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

BLOCK_TOKENS = 512
"""Prompt tokens of one hash id in Mooncake's traces."""
FIRST_BLOCK_TOKEN = 1 << 20
"""Token ids below are outputs; see `runner`."""
MAX_TOKENS = 10_000_000
"""Of one prompt or answer. A larger number is a wrong field rather than a long prompt."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, as it was recorded.

    `hash_ids` name the blocks from the beginning of the prompt on. What they do not cover is shared with no request.
    """

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]

    def after(self, start_s: float) -> TraceRow:
        """The same, with its time from `start_s` on."""
        return TraceRow(self.at_s - start_s, self.input_len, self.output_len, self.hash_ids)


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload. `blocks` name its pages; the last may be cut short."""

    at_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...]
    block_tokens: int
    routing_key: str = ""
    priority: int = 0
    api_key: int | None = None
    max_new_tokens: int | None = None
    """What its client allows; a model that ends by itself stays below it. None: twice the output."""

    def input_ids(self) -> tuple[int, ...]:
        """Its made-up prompt. Built when it is sent: a fleet's prompts would not fit into memory at once."""
        filler = _filler(self.block_tokens)
        ids: list[int] = []
        for block in self.blocks:
            ids.append(FIRST_BLOCK_TOKEN + block)
            ids += filler
        del ids[self.input_len :]
        return tuple(ids)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The requests of one file, in order of arrival. The first arrives at 0 s."""

    rows: Sequence[TraceRow]
    block_tokens: int = BLOCK_TOKENS
    """Prompt tokens of one hash id."""
    remarks: tuple[str, ...] = ()
    """What a plan from this trace should be read with. Each is a sentence for the user."""

    def requests(self, *, rate: float = 1.0) -> Iterator[SimRequest]:
        """As a workload: lengths as recorded, arriving `rate` times as fast."""
        return scaled(self.rows, scale=1, rate=rate, block_tokens=self.block_tokens)


def scaled(
    rows: Sequence[TraceRow],
    *,
    scale: int = 16,
    rate: float = 1.0,
    replay: int = 0,
    start_s: float = 0.0,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[SimRequest]:
    """`rows` with lengths divided by `scale`, arriving `rate` times as fast from `start_s` on.

    `replay` shifts block ids, so that prefixes of different replays never meet. `block_tokens` are the tokens of one
    hash id before they are divided.
    """
    num_ids = 1 + max((max(row.hash_ids) for row in rows if row.hash_ids), default=0)
    shift = replay * (num_ids + sum(_num_unnamed(row, block_tokens) for row in rows)) if replay else 0
    own = shift + num_ids
    for row in rows:
        input_len = max(row.input_len // scale, 1)
        num_blocks = -(-input_len // (block_tokens // scale))
        blocks = tuple(shift + block for block in row.hash_ids[:num_blocks])
        num_own = num_blocks - len(blocks)
        blocks += tuple(range(own, own + num_own))
        own += num_own
        yield SimRequest(
            start_s + row.at_s / rate,
            input_len,
            max(row.output_len // scale, 1),
            blocks,
            block_tokens // scale,
        )


def shared_tokens(requests: Iterable[SimRequest]) -> int:
    """Prompt tokens that a cache without bounds would serve: whole blocks that an earlier prompt had."""
    seen: set[int] = set()
    num_tokens = 0
    for request in requests:
        num_known = next(
            (at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks)
        )
        num_tokens += min(num_known * request.block_tokens, request.input_len)
        seen.update(request.blocks)
    return num_tokens


def _num_unnamed(row: TraceRow, block_tokens: int) -> int:
    return max(0, -(-row.input_len // block_tokens) - len(row.hash_ids))


@cache
def _filler(block_tokens: int) -> tuple[int, ...]:
    return tuple(range(1, block_tokens))
