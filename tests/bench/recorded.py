"""The recorded traces of tests/bench/traces, and what smaller fleets are loaded with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from planner.traffic.reading import read_trace
from planner.traffic.trace import SimRequest

TRACES = Path(__file__).with_name("traces")
MOONCAKE = "mooncake_conversation_part1"
AZURE = "azure2023_conv_part1"


def load_trace(name: str = MOONCAKE) -> Sequence[SimRequest]:
    """A committed trace, in order of arrival."""
    return read_trace(TRACES / f"{name}.jsonl.gz").requests


def scaled(
    requests: Sequence[SimRequest],
    *,
    scale: int = 16,
    rate: float = 1.0,
    replay: int = 0,
    start_s: float = 0.0,
) -> Iterator[SimRequest]:
    """The requests with lengths divided by `scale`, arriving `rate` times as fast from `start_s` on.

    `replay` shifts blocks, so that prefixes of different replays never meet.
    """
    shift = replay * (1 + max(max(request.blocks) for request in requests)) if replay else 0
    for request in requests:
        input_len = max(request.input_len // scale, 1)
        block_tokens = request.block_tokens // scale
        blocks = request.blocks[: -(-input_len // block_tokens)]
        yield replace(
            request,
            at_s=start_s + request.at_s / rate,
            input_len=input_len,
            output_len=max(request.output_len // scale, 1),
            blocks=tuple(shift + block for block in blocks) if shift else blocks,
            block_tokens=block_tokens,
        )
