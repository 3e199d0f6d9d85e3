"""The recorded traces of tests/bench/traces."""

from __future__ import annotations

from pathlib import Path

from planner.traffic.reading import read_trace
from planner.traffic.trace import TraceRow

TRACES = Path(__file__).with_name("traces")
MOONCAKE = "mooncake_conversation_part1"
AZURE = "azure2023_conv_part1"


def load_trace(name: str = MOONCAKE) -> list[TraceRow]:
    """A committed trace, in order of arrival."""
    return list(read_trace(TRACES / f"{name}.jsonl.gz").rows)
