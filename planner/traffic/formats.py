"""The formats of traces: how one line of each becomes requests.

mooncake      JSONL: timestamp (ms), input_length, output_length, hash_ids. Mooncake's own, and aiperf's
              mooncake_trace, in which the turns of one session_id follow each other
vllm          the same fields as vllm bench serve --dataset-name timed_trace reads them: timestamp in seconds
azure         CSV or JSONL: TIMESTAMP (a date), ContextTokens, GeneratedTokens
aiperf        JSONL: the profile_export.jsonl of a run of aiperf
vllm-result   JSON: the result of vllm bench serve --save-result --save-detailed
router        the log of `router` with --log-requests, in which other lines are skipped
"""

from __future__ import annotations

import csv
import json
from collections.abc import Hashable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from planner.traffic.arrival import MAX_TOKENS, Arrival, BadLine, Length, ParseLine, Time, whole_number
from planner.traffic.router_log import RouterLog
from planner.traffic.trace import BLOCK_TOKENS


class TraceFormat(StrEnum):
    """What `--trace-format` may say."""

    MOONCAKE = "mooncake"
    VLLM = "vllm"
    AZURE = "azure"
    AIPERF = "aiperf"
    VLLM_RESULT = "vllm-result"
    ROUTER = "router"


# ----------------------------------------------------------------------------- timestamp, input_length, output_length
class _TimedLine(msgspec.Struct):
    timestamp: Time | None = None
    delay: Time | None = None
    input_length: Length | None = None
    output_length: Length | None = None
    hash_ids: tuple[int, ...] = ()
    session_id: str | None = None


class _Session:
    """The conversation so far: its tokens, and a name of each of its blocks."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.blocks: list[Hashable] = []


class TimedLines:
    """A turn of a session begins with all prompts and answers of the session so far, as aiperf sends it.

    The hash ids of later turns are counted from the turn's own beginning. They cannot be placed in the whole prompt,
    so only those of the first turn are used.
    """

    def __init__(self, units_a_second: float) -> None:
        self._units_a_second = units_a_second
        """Of `timestamp`."""
        self._decode = msgspec.json.Decoder(_TimedLine).decode
        self._sessions: dict[str, _Session] = {}

    def __call__(self, line: bytes) -> Iterator[Arrival]:
        """Parse one line."""
        row = self._decode(line)
        if row.input_length is None:
            raise BadLine(
                "input_length is missing. Texts alone have no length before a tokenizer has read them: send them to "
                "a router with --log-requests, and plan from its log"
            )
        if row.output_length is None:
            raise BadLine("output_length is missing")
        if row.timestamp is None and row.delay is not None:
            raise BadLine(
                "timestamp is missing. A turn with a delay is sent so long after the answer before it, which depends "
                "on the fleet: plan from the profile_export.jsonl of a run of aiperf instead"
            )
        if row.timestamp is None:
            raise BadLine("timestamp is missing")
        at_s = row.timestamp / self._units_a_second
        if row.session_id is None:
            yield Arrival(at_s, row.input_length, row.output_length, row.hash_ids)
            return
        session = self._sessions.setdefault(row.session_id, _Session())
        if not session.blocks:
            session.blocks += row.hash_ids
        input_len = session.num_tokens + row.input_length
        if input_len > MAX_TOKENS:
            raise BadLine(
                f"the prompt of session {row.session_id[:40]!r} has {input_len} tokens by now, "
                f"and may have {MAX_TOKENS}"
            )
        first, num_blocks = len(session.blocks), -(-input_len // BLOCK_TOKENS)
        session.blocks += ((row.session_id, block) for block in range(first, num_blocks))
        session.num_tokens = input_len + row.output_length
        yield Arrival(at_s, input_len, row.output_length, tuple(session.blocks[:num_blocks]))


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


# ----------------------------------------------------------------------------------------------- recorded benchmarks
class _Tokens(msgspec.Struct):
    value: Length


class _AiperfMetadata(msgspec.Struct):
    request_start_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    benchmark_phase: str = "profiling"


class _AiperfMetrics(msgspec.Struct):
    input_sequence_length: _Tokens | None = None
    output_sequence_length: _Tokens | None = None
    error_isl: _Tokens | None = None


class _AiperfLine(msgspec.Struct):
    metadata: _AiperfMetadata
    metrics: _AiperfMetrics | None = None


def aiperf_line(line: bytes) -> Iterator[Arrival]:
    """One record. Warm-up is no part of the trace; a request that failed has no answer."""
    row = msgspec.json.decode(line, type=_AiperfLine)
    if row.metadata.benchmark_phase != "profiling":
        return
    metrics = row.metrics or _AiperfMetrics()
    prompt = metrics.input_sequence_length or metrics.error_isl
    answer = metrics.output_sequence_length
    at_s = row.metadata.request_start_ns / 1e9
    yield Arrival(at_s, prompt.value if prompt else 0, answer.value if answer else 0)


class _VllmResult(msgspec.Struct):
    input_lens: tuple[Length, ...] | None = None
    output_lens: tuple[Length, ...] | None = None
    start_times: tuple[float, ...] | None = None


class VllmResults:
    """The file is one JSON object, on one line or on several."""

    def __init__(self) -> None:
        self._num_read = 0

    def __call__(self, document: bytes) -> Iterator[Arrival]:
        """Parse it."""
        result = msgspec.json.decode(document, type=_VllmResult)
        self._num_read += 1
        if self._num_read > 1:
            raise BadLine("another result begins here (--append-result), and a trace is one run")
        starts = _wanted("start_times", result.start_times)
        inputs, outputs = _wanted("input_lens", result.input_lens), _wanted("output_lens", result.output_lens)
        if not len(starts) == len(inputs) == len(outputs):
            raise BadLine(
                f"start_times, input_lens and output_lens have {len(starts)}, {len(inputs)} and {len(outputs)} "
                "entries, and must have one for each request"
            )
        for at_s, input_len, output_len in zip(starts, inputs, outputs, strict=True):
            yield Arrival(at_s, input_len, output_len)


_T = TypeVar("_T")


def _wanted(name: str, column: tuple[_T, ...] | None) -> tuple[_T, ...]:
    if column is None:
        raise BadLine(f"{name} is missing: vllm bench serve writes it with --save-result --save-detailed")
    return column


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
    TraceFormat.AIPERF: ("metadata", "metrics"),
    TraceFormat.VLLM_RESULT: ("input_lens", "output_lens", "start_times"),
}
"""By which a format is known."""
_BY_ONE_FIELD = {"input_length": TraceFormat.MOONCAKE, "input_lens": TraceFormat.VLLM_RESULT}
"""A line with this field is of that format, so that a missing field is named rather than the format unknown."""


def format_of(line: bytes) -> TraceFormat:
    """The format of a file by its first line. Raises BadLine."""
    if line.startswith(b"{"):
        try:
            names = list(json.loads(line))
        except ValueError:
            if line == b"{":
                return TraceFormat.VLLM_RESULT
            raise BadLine("it begins as a JSON object, and is none") from None
    else:
        try:
            names = _cells(line)
        except BadLine:  # no header of a CSV; a log may begin with any line, such as a progress bar
            return TraceFormat.ROUTER
    for trace_format, fields in _FIELDS_OF.items():
        if set(fields) <= set(names):
            return trace_format
    for name, trace_format in _BY_ONE_FIELD.items():
        if name in names:
            return trace_format
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
        case TraceFormat.AIPERF:
            return aiperf_line
        case TraceFormat.VLLM_RESULT:
            return VllmResults()
        case TraceFormat.ROUTER:
            return RouterLog()
