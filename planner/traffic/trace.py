"""A trace: when requests came, how long their prompts and answers were, and which prefixes they shared. Never text.

A trace names each block of so many prompt tokens by an id; equal ids mean equal blocks with equal prefixes. Here a
block becomes that many made-up tokens: its id, then a filler, so that prompts share a prefix where their ids do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

BLOCK_TOKENS = 512
"""Prompt tokens of one hash id in Mooncake's traces."""
FIRST_BLOCK_TOKEN = 1 << 20
"""Token ids below are outputs; see `runner`."""
MAX_TOKENS = 10_000_000
"""Of one prompt or answer. A larger number is a wrong field rather than a long prompt."""


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

    requests: Sequence[SimRequest]
    remarks: tuple[str, ...] = ()
    """What a plan from this trace should be read with. Each is a sentence for the user."""


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


@cache
def _filler(block_tokens: int) -> tuple[int, ...]:
    return tuple(range(1, block_tokens))
