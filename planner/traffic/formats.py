"""The formats of traces: how one line of each becomes requests.

mooncake   JSONL: timestamp (ms), input_length, output_length, hash_ids
vllm       the same fields as vllm bench serve --dataset-name timed_trace reads them: timestamp in seconds
azure      CSV or JSONL: TIMESTAMP (a date), ContextTokens, GeneratedTokens
router     the log of `router` with --log-requests, in which other lines are skipped
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from planner.traffic.arrival import Arrival, BadLine, Length, ParseLine, Time, whole_number
from planner.traffic.router_log import RouterLog


class TraceFormat(StrEnum):
    """What `--trace-format` may say."""

    MOONCAKE = "mooncake"
    VLLM = "vllm"
    AZURE = "azure"
    ROUTER = "router"


# ----------------------------------------------------------------------------- timestamp, input_length, output_length
class _TimedLine(msgspec.Struct):
    timestamp: Time | None = None
    input_length: Length | None = None
    output_length: Length | None = None
    hash_ids: tuple[int, ...] = ()
    session_id: str | None = None


class TimedLines:
    """One JSON object a line."""

    def __init__(self, units_a_second: float) -> None:
        self._units_a_second = units_a_second
        """Of `timestamp`."""
        self._decode = msgspec.json.Decoder(_TimedLine).decode

    def __call__(self, line: bytes) -> Iterator[Arrival]:
        """Parse one line."""
        row = self._decode(line)
        if row.session_id is not None:
            raise BadLine(
                "session_id: what was said before in a session is no part of a turn's input_length here: send the "
                "trace to a router with --log-requests, and plan from its log"
            )
        if row.input_length is None:
            raise BadLine(
                "input_length is missing. Texts alone have no length before a tokenizer has read them: send them to "
                "a router with --log-requests, and plan from its log"
            )
        if row.output_length is None:
            raise BadLine("output_length is missing")
        if row.timestamp is None:
            raise BadLine("timestamp is missing")
        yield Arrival(row.timestamp / self._units_a_second, row.input_length, row.output_length, row.hash_ids)


# ------------------------------------------------------------------------------------------- TIMESTAMP, ContextTokens
class _AzureLine(msgspec.Struct, rename="pascal"):
    timestamp: str = msgspec.field(name="TIMESTAMP")
    context_tokens: Length
    generated_tokens: Length


def azure_line(line: bytes) -> Iterator[Arrival]:
    """One JSON object; a CSV's lines go through `AzureCsv`."""
    row = msgspec.json.decode(line, type=_AzureLine)
    yield Arrival(_date(row.timestamp), row.context_tokens, row.generated_tokens)


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureCsv:
    """Lines below a header."""

    def __init__(self, header: bytes) -> None:
        self._names = _cells(header)
        missing = [column for column in AZURE_COLUMNS if column not in self._names]
        if missing:
            raise BadLine(f"the header has no column {missing[0]}")
        self._header: bytes | None = header

    def __call__(self, line: bytes) -> Iterator[Arrival]:
        """Parse one line. The first is the header."""
        if line == self._header:
            self._header = None
            return
        cells = _cells(line)
        if len(cells) != len(self._names):
            raise BadLine(f"there are {len(cells)} fields, and the header has {len(self._names)}")
        at, *lengths = ((name, cells[self._names.index(name)]) for name in AZURE_COLUMNS)
        prompt, answer = (whole_number(*length) for length in lengths)
        yield Arrival(_date(at[1]), prompt, answer)


def _cells(line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig", "replace")]))]
    except csv.Error as error:
        raise BadLine(str(error)) from None


def _date(text: str) -> float:
    """Seconds since 1970; UTC, where the date names no zone."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise BadLine(
            f"TIMESTAMP is {text[:40]!r}, and must be a date such as 2023-11-16 18:15:46.6805900"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


# ------------------------------------------------------------------------------------------------------- which format
_FIELDS_OF = {
    TraceFormat.VLLM: (
        "chat_id",
        "timestamp",
        "input_length",
        "output_length",
    ),  # Alibaba's traces, in seconds
    TraceFormat.MOONCAKE: ("timestamp", "input_length", "output_length"),
    TraceFormat.AZURE: AZURE_COLUMNS,
}
"""By which a format is known."""


def format_of(line: bytes) -> TraceFormat:
    """The format of a file by its first line. Raises BadLine."""
    if line.startswith(b"{"):
        try:
            names = list(json.loads(line))
        except ValueError:
            raise BadLine("it begins as a JSON object, and is none") from None
    else:
        try:
            names = _cells(line)
        except BadLine:  # no header of a CSV; a log may begin with any line, such as a progress bar
            return TraceFormat.ROUTER
    for trace_format, fields in _FIELDS_OF.items():
        if set(fields) <= set(names):
            return trace_format
    if "input_length" in names:  # so that a missing field is named rather than the format unknown
        return TraceFormat.MOONCAKE
    if not line.startswith((b"{", b"[")):
        return TraceFormat.ROUTER
    known = "; ".join(f"{one}: {', '.join(fields)}" for one, fields in _FIELDS_OF.items())
    has = f"it has the fields {', '.join(names)[:200]}" if line.startswith(b"{") else "it is a list"
    raise BadLine(
        f"{has}, which is no known trace. The formats are {known}; and router, the log of --log-requests"
    )


def parser_of(trace_format: TraceFormat, first: bytes) -> ParseLine:
    """What parses the lines of a file that begins with `first`. Raises BadLine."""
    match trace_format:
        case TraceFormat.MOONCAKE:
            return TimedLines(1e3)
        case TraceFormat.VLLM:
            return TimedLines(1.0)
        case TraceFormat.AZURE:
            return azure_line if first.startswith(b"{") else AzureCsv(first)
        case TraceFormat.ROUTER:
            return RouterLog()
