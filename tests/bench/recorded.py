"""The recorded traces of tests/bench/traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from planner.traffic.trace import TraceRow

TRACES = Path(__file__).with_name("traces")
MOONCAKE = "mooncake_conversation_part1"
AZURE = "azure2023_conv_part1"


def load_trace(name: str = MOONCAKE) -> list[TraceRow]:
    """A committed trace, in order of arrival."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [
        TraceRow(
            row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row.get("hash_ids", ()))
        )
        for row in rows
    ]
