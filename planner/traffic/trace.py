"""Public request traces as workloads: lengths, arrival times, and which prefixes are shared.

The traces (tests/bench/traces/README.md) hold no texts. Mooncake names each block of 512 prompt tokens by an id,
and equal ids mean equal blocks with equal prefixes. Here a block becomes a page's worth of made-up tokens: its id,
then a filler, so that blocks are equal when their ids are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_TOKENS = 512
"""Prompt tokens of one hash id in Mooncake's traces."""
FIRST_BLOCK_TOKEN = 1 << 20
"""Token ids below are outputs; see `runner`."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, as it was recorded. `hash_ids` is empty where the trace has none."""

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]


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
        filler = tuple(range(1, self.block_tokens))
        ids: list[int] = []
        for block in self.blocks:
            ids.append(FIRST_BLOCK_TOKEN + block)
            ids += filler
        return tuple(ids[: self.input_len])


def scaled(
    rows: list[TraceRow], *, scale: int = 16, rate: float = 1.0, replay: int = 0, start_s: float = 0.0
) -> Iterator[SimRequest]:
    """`rows` with lengths divided by `scale`, arriving `rate` times as fast from `start_s` on.

    `replay` shifts block ids, so that prefixes of different replays never meet. Requests without hash ids share
    nothing.
    """
    block_tokens = BLOCK_TOKENS // scale
    num_ids = 1 + max((max(row.hash_ids) for row in rows if row.hash_ids), default=0)
    own = num_ids
    unique = sum(-(-row.input_len // BLOCK_TOKENS) for row in rows if not row.hash_ids)
    shift = replay * (num_ids + unique)
    for row in rows:
        input_len = max(row.input_len // scale, 1)
        num_blocks = -(-input_len // block_tokens)
        if row.hash_ids:
            blocks = tuple(shift + block for block in row.hash_ids[:num_blocks])
        else:
            blocks = tuple(range(shift + own, shift + own + num_blocks))
            own += num_blocks
        yield SimRequest(
            start_s + row.at_s / rate, input_len, max(row.output_len // scale, 1), blocks, block_tokens
        )
