"""Reads a trace of any known format, line by line: `read_trace(path)`."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from planner.traffic.arrival import Arrival, BadLine
from planner.traffic.formats import TimedLines, TraceFormat, format_of, parser_of
from planner.traffic.router_log import RouterLog
from planner.traffic.trace import BLOCK_TOKENS, Trace, TraceRow
from router.api.prefix_hashes import BLOCK_TOKENS as LOG_BLOCK
from shared.errors import ConfigError

MAX_PLAUSIBLE_RATE = 1000.0
"""Requests a second. A trace above it was probably read with the wrong unit of time."""

_BLOCK_SIZES = (BLOCK_TOKENS, 16, 32, 64, 128, 256, 1024, 8, 2048, 4096)
"""Tokens of one hash id that traces have, the likely ones first: Mooncake's, then a page's."""
_GZIP = b"\x1f\x8b"


def read_trace(path: Path, trace_format: TraceFormat | None = None) -> Trace:
    """Read a trace, plain or gzip. Its format is told by its first line, unless `trace_format` names it.

    Lines may be in any order of time. Requests without a prompt or an answer are left out, which a remark says.
    Raises ConfigError that names the line and the field, or says that there is nothing to plan.
    """
    reader = _Reader(path)
    try:
        return reader.read(trace_format)
    except (BadLine, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--trace {path}, line {reader.line_number}: {_in_words(error)}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--trace {path}: {getattr(error, 'strerror', None) or error}") from None


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.line_number = 1
        self._names: dict[object, int] = {}
        """The number of each block, in order of their first use."""
        self._sizes = list(_BLOCK_SIZES)
        self._num_left_out = 0

    def read(self, trace_format: TraceFormat | None) -> Trace:
        with self._open() as file:
            lines = self._lines(file)
            first = next(lines, None)
            if first is None:
                raise ConfigError(f"--trace {self._path}: it is empty, and a plan needs at least one request")
            trace_format = trace_format or format_of(first)
            parse = parser_of(trace_format, first)
            infers_size = isinstance(parse, TimedLines)
            rows = [
                self._row(arrival, infers_size)
                for line in chain((first,), lines)
                for arrival in parse(line)
                if self._counts(arrival)
            ]
        if not rows:
            raise ConfigError(f"--trace {self._path}: {self._why_none(trace_format)}")
        block_tokens = self._sizes[0]
        remarks: list[str] = []
        if isinstance(parse, RouterLog):
            block_tokens = parse.block_tokens or BLOCK_TOKENS
            remarks += _remarks_on_log(parse)
        if self._num_left_out:
            remarks.append(f"Requests without a prompt or an answer are left out: {self._num_left_out}.")
        return self._trace(rows, trace_format, block_tokens, remarks)

    def _trace(
        self, rows: list[TraceRow], trace_format: TraceFormat, block_tokens: int, remarks: list[str]
    ) -> Trace:
        rows.sort(key=lambda row: row.at_s)
        start_s, seconds = rows[0].at_s, rows[-1].at_s - rows[0].at_s
        if len(rows) > 1 and not seconds:
            raise ConfigError(
                f"--trace {self._path}: all {len(rows)} requests arrive at the same time, and a plan needs the time "
                "of each"
            )
        if len(rows) > MAX_PLAUSIBLE_RATE * seconds and len(rows) > 1:
            remarks.append(
                f"The trace has {len(rows) / seconds:.0f} requests a second. If its timestamps are seconds and not "
                f"milliseconds, --trace-format {TraceFormat.VLLM} reads them so."
            )
        if not self._names:
            is_short = trace_format is TraceFormat.ROUTER and all(row.input_len < LOG_BLOCK for row in rows)
            why = (
                f"A log tells of shared prefixes by blocks of {LOG_BLOCK} tokens, and every prompt is shorter"
                if is_short
                else "The trace does not tell which prompts share a prefix"
            )
            remarks.append(f"{why}, so no prompt is planned to find any of its tokens in a cache.")
        for at, row in enumerate(rows):
            rows[at] = TraceRow(row.at_s - start_s, row.input_len, row.output_len, row.hash_ids)
        return Trace(
            rows=rows, trace_format=str(trace_format), block_tokens=block_tokens, remarks=tuple(remarks)
        )

    def _open(self) -> BinaryIO:
        with self._path.open("rb") as file:
            is_packed = file.read(len(_GZIP)) == _GZIP
        return cast(BinaryIO, gzip.open(self._path)) if is_packed else self._path.open("rb")

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        for self.line_number, line in enumerate(file, 1):
            stripped = line.strip().removeprefix(b"\xef\xbb\xbf")
            if stripped:
                yield stripped

    def _counts(self, arrival: Arrival) -> bool:
        counts = arrival.input_len > 0 and arrival.output_len > 0
        self._num_left_out += not counts
        return counts

    def _row(self, arrival: Arrival, infers_size: bool) -> TraceRow:
        at_s, input_len, output_len, blocks = arrival
        if blocks and infers_size:
            possible = [size for size in self._sizes if -(-input_len // size) == len(blocks)]
            if not possible:
                sizes = " or ".join(map(str, sorted(self._sizes)))
                raise BadLine(
                    f"hash_ids has {len(blocks)} ids for {input_len} prompt tokens, and there must be one for each "
                    f"{sizes} tokens, as in the lines before"
                )
            self._sizes = possible
        names = self._names
        return TraceRow(
            at_s, input_len, output_len, tuple(names.setdefault(block, len(names)) for block in blocks)
        )

    def _why_none(self, trace_format: TraceFormat) -> str:
        if self._num_left_out:
            return f"none of its requests ({self._num_left_out}) has both a prompt and an answer"
        if trace_format is TraceFormat.ROUTER:
            return (
                "it has no request. It was read as the log of a router, which needs --log-requests; other formats "
                f"are {', '.join(one for one in TraceFormat if one is not TraceFormat.ROUTER)} (--trace-format)"
            )
        return "it has no request, and a plan needs at least one"


def _remarks_on_log(log: RouterLog) -> Iterator[str]:
    if log.num_refused:
        yield (
            f"Requests that were refused before they had a token: {log.num_refused}. Their lengths are not known, so "
            "they are left out: the real load was higher."
        )
    if len(log.keys) > 1:
        yield (
            f"The log has prefix hashes under {len(log.keys)} keys, which cannot be compared with each other, so "
            "less reuse is planned than there was. Routers with one --fleet-key have one key."
        )


def _in_words(error: Exception) -> str:
    """msgspec names the field last: Expected `int`, got `str` - at `$.input_length`."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    what, found, where = str(error).partition(" - at `$.")
    return f"{where.rstrip('`')}: {what}" if found else what
