"""Reads a trace: `read_trace(path)`. Its format is told by its first line.

mooncake   JSONL: timestamp (ms), input_length, output_length, hash_ids
vllm       the same fields as vllm bench serve --dataset-name timed_trace reads them: timestamp in seconds
router     the log of `router --log-requests` (`router/api/request_log.py`), in which other lines are skipped
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from planner.traffic.trace import BLOCK_TOKENS, MAX_TOKENS, SimRequest, Trace
from router.api.prefix_hashes import HASH_NBYTES
from shared.errors import ConfigError

_BLOCK_SIZES = (BLOCK_TOKENS, 16, 32, 64, 128, 256, 1024, 8, 2048, 4096)
"""Tokens of one hash id that traces have, the likely ones first: Mooncake's, then a page's."""
_EVENT = re.compile(rb'^[^"]*?\brequest (request_id=.*)$')
"""No quote may stand before it: the values of other events that a client may choose are quoted."""
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)(?: |$)')

Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e16)]


class TraceFormat(StrEnum):
    """What `--trace-format` may say."""

    MOONCAKE = "mooncake"
    VLLM = "vllm"
    ROUTER = "router"


class _BadLine(ValueError):
    """A line is not of its format. The message names the field, what it is, and what it may be."""


class _Arrival(NamedTuple):
    """One request as a line tells it. `blocks` name the first blocks of its prompt."""

    at_s: float
    input_len: int
    output_len: int
    blocks: Sequence[Any] = ()
    """Hashable names; numbers once they are counted."""


_Parse = Callable[[bytes], Iterable[_Arrival]]
"""Raises _BadLine or msgspec.MsgspecError."""


class _TimedLine(msgspec.Struct):
    timestamp: Time
    input_length: Length
    output_length: Length
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, trace_format: TraceFormat | None = None) -> Trace:
    """Read a trace, gzipped if so named. Its format is told by its first line, unless `trace_format` names it.

    Lines may be in any order of time. Requests without a prompt or an answer are left out, which a remark says.
    Raises ConfigError that names the line and the field, or says that there is nothing to plan.
    """
    reader = _Reader()
    try:
        return reader.read(path, trace_format)
    except (_BadLine, msgspec.MsgspecError, RecursionError) as error:
        words = "its JSON is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"--trace {path}, line {reader.line_number}: {words}") from None
    except (OSError, EOFError, zlib.error, ConfigError) as error:
        raise ConfigError(f"--trace {path}: {getattr(error, 'strerror', None) or error}") from None


class _Reader:
    def __init__(self) -> None:
        self.line_number = 1
        self._names: dict[Hashable, int] = {}
        """The number of each block, in order of their first use."""
        self._sizes = list(_BLOCK_SIZES)
        """Tokens that a block may have, by the lines so far."""
        self._num_left_out = 0

    def read(self, path: Path, trace_format: TraceFormat | None) -> Trace:
        arrivals: list[_Arrival] = []
        log = _RouterLog()
        parse: _Parse | None = None
        for line in self._lines(path):
            if parse is None:
                trace_format = trace_format or _format_of(line)
                parse = log if trace_format is TraceFormat.ROUTER else _parser_of(trace_format)
            for arrival in parse(line):
                if not arrival.input_len or not arrival.output_len:
                    self._num_left_out += 1
                    continue
                if parse is not log:
                    self._infer_size(arrival)
                blocks = [self._names.setdefault(block, len(self._names)) for block in arrival.blocks]
                arrivals.append(arrival._replace(blocks=blocks))
        if trace_format is None:
            raise ConfigError("it is empty, and a plan needs at least one request")
        if not arrivals:
            raise ConfigError(
                f"it has no request with a prompt and an answer ({self._num_left_out} without). It was read as "
                f"{trace_format}; --trace-format names another, and a router's log needs --log-requests"
            )
        arrivals.sort(key=lambda one: one.at_s)
        return Trace(
            requests=self._requests(arrivals, log.block_tokens or self._sizes[0]),
            remarks=(*log.remarks(), *self._remarks()),
        )

    def _requests(self, arrivals: Sequence[_Arrival], block_tokens: int) -> list[SimRequest]:
        """Blocks that the trace does not name are shared with no request."""
        num_blocks = len(self._names)
        requests = []
        for at_s, input_len, output_len, named in arrivals:
            num_own = max(0, -(-input_len // block_tokens) - len(named))
            blocks = (*named, *range(num_blocks, num_blocks + num_own))
            num_blocks += num_own
            requests.append(SimRequest(at_s - arrivals[0].at_s, input_len, output_len, blocks, block_tokens))
        return requests

    def _lines(self, path: Path) -> Iterator[bytes]:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for self.line_number, line in enumerate(file, 1):
                stripped = line.strip().removeprefix(b"\xef\xbb\xbf")
                if stripped:
                    yield stripped

    def _infer_size(self, arrival: _Arrival) -> None:
        """Leave only the sizes of blocks that its number of blocks allows."""
        if not arrival.blocks:
            return
        possible = [size for size in self._sizes if -(-arrival.input_len // size) == len(arrival.blocks)]
        if not possible:
            sizes = " or ".join(map(str, sorted(self._sizes)))
            raise _BadLine(
                f"hash_ids has {len(arrival.blocks)} ids for {arrival.input_len} prompt tokens, and there must be "
                f"one for each {sizes} tokens, as in the lines before"
            )
        self._sizes = possible

    def _remarks(self) -> Iterator[str]:
        if self._num_left_out:
            yield f"Requests without a prompt or an answer are left out: {self._num_left_out}."
        if not self._names:
            yield (
                "The trace does not tell which prompts share a prefix, so no prompt is planned to find any of its "
                "tokens in a cache."
            )


# ------------------------------------------------------------------------------------------------------ formats
def _format_of(line: bytes) -> TraceFormat:
    """The format of a file by its first line."""
    if not line.startswith((b"{", b"[")):
        return TraceFormat.ROUTER  # a log may begin with any line, such as a progress bar
    try:
        names = set(json.loads(line))
    except (ValueError, TypeError):
        names = set()
    if not {"timestamp", "input_length"} <= names:
        raise _BadLine("its fields are of no known trace; docs/planning.md lists them")
    return TraceFormat.VLLM if "chat_id" in names else TraceFormat.MOONCAKE  # Alibaba's traces are in seconds


def _parser_of(trace_format: TraceFormat) -> _Parse:
    """What parses the lines of a trace of this format."""
    units_a_second = 1.0 if trace_format is TraceFormat.VLLM else 1e3
    decode = msgspec.json.Decoder(_TimedLine).decode

    def timed(line: bytes) -> Iterator[_Arrival]:
        row = decode(line)
        yield _Arrival(row.timestamp / units_a_second, row.input_length, row.output_length, row.hash_ids)

    return timed


class _LoggedRequest(msgspec.Struct):
    arrived_ms: Time
    prompt_lens: str
    output_lens: str = ""
    prefixes: str | None = None
    prefix_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 1
    prefix_key: str = ""


class _RouterLog:
    """A line may have several prompts, and a prompt several answers. Every answer is one request of the trace."""

    def __init__(self) -> None:
        self.block_tokens: int | None = None
        self._num_refused = 0
        self._keys: set[str] = set()

    def __call__(self, line: bytes) -> Iterator[_Arrival]:
        if (found := _EVENT.match(line)) is None:
            return
        pairs = _FIELD.findall(found[1].decode("utf-8", "replace"))
        fields = {name: value.strip('"') for name, value in pairs}
        if "prompt_lens" not in fields:
            self._num_refused += fields.get("status") in ("429", "503") and "POST" in fields.get("route", "")
            return
        request = msgspec.convert(fields, _LoggedRequest, strict=False)
        prompts = request.prompt_lens.split(";")
        answers = request.output_lens.split(";")
        prefixes = [""] * len(prompts) if request.prefixes is None else request.prefixes.split(";")
        if not len(prompts) == len(answers) == len(prefixes):
            raise _BadLine("prompt_lens, output_lens and prefixes must have one entry for each prompt")
        if request.prefixes is not None:
            if self.block_tokens not in (None, request.prefix_tokens):
                raise _BadLine(
                    f"prefix_tokens is {request.prefix_tokens}, after {self.block_tokens} in lines before"
                )
            self.block_tokens = request.prefix_tokens
            self._keys.add(request.prefix_key)
        for prompt, outputs, prefix in zip(prompts, answers, prefixes, strict=True):
            input_len, *output_lens = (_length(text) for text in (prompt, *outputs.split(",")))
            for output_len in output_lens:
                yield _Arrival(request.arrived_ms / 1e3, input_len, output_len, _prefix_blocks(prefix))

    def remarks(self) -> Iterator[str]:
        """What a log cannot tell."""
        if self._num_refused:
            yield (
                f"Requests that were refused before they had a token: {self._num_refused}. Their lengths are not "
                "known, so they are left out: the real load was higher."
            )
        if len(self._keys) > 1:
            yield f"Prefixes are under {len(self._keys)} keys of routers, so less reuse is planned than there was."


def _length(text: str) -> int:
    return msgspec.convert(text, Length, strict=False)


def _prefix_blocks(text: str) -> tuple[bytes, ...]:
    try:
        packed = base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        packed = b"?"
    if len(packed) % HASH_NBYTES:
        raise _BadLine(f"prefixes has {text[:40]!r}, and must be base64 of {HASH_NBYTES} bytes for each hash")
    return tuple(packed[at : at + HASH_NBYTES] for at in range(0, len(packed), HASH_NBYTES))
