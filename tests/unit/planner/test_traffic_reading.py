"""Traces of every format become the same requests, and a bad line is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.traffic.reading import TraceFormat, read_trace
from planner.traffic.trace import Trace, shared_tokens
from shared.errors import ConfigError

MOONCAKE = """
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""  # noqa: E501
PAGES = """
{"timestamp": 61114, "input_length": 40, "output_length": 132, "hash_ids": [1089, 1090, 1091]}
{"timestamp": 62500, "input_length": 50, "output_length": 80, "hash_ids": [1089, 1090, 7, 8]}
"""
BAILIAN = PAGES.replace('{"timestamp": 61114', '{"chat_id": 1, "timestamp": 61114')
NO_IDS = """
{"timestamp": 0, "input_length": 4808, "output_length": 10}
{"timestamp": 52, "input_length": 3180, "output_length": 8}
"""
LOG = """
12:03:03.020 INFO    [router-0] router_listening http_port=8000 incarnation=4f21
12:03:04.120 INFO    [router-0] request request_id=b route="POST /generate" status=200 rid="a \\" x arrived_ms=5" prompt_tokens=230 completion_tokens=21 arrived_ms=1763935383120 prompt_lens=130;100 output_lens=16,5;7 prefixes=AAAAAAAAAAEAAAAAAAAAAg==;AAAAAAAAAAE= prefix_tokens=64 prefix_key=1f e2e_s=0.2
12:03:04.125 INFO    [router-0] request request_id=c route="GET /health" status=503 e2e_s=0.002
12:03:04.126 WARNING [router-1] slow_reader rid="a request request_id=1 prompt_lens=5"
12:03:04.130 INFO    [router-1] request request_id=d route="POST /generate" status=429 code=queue_full e2e_s=0.002
12:03:05.500 INFO    [router-1] request request_id=e route="POST /v1/completions" status=200 arrived_ms=1763935383020 prompt_lens=63 output_lens=40 prefixes="" prefix_tokens=64 prefix_key=2e e2e_s=2.48
"""  # noqa: E501


def read(tmp_path: Path, text: str, trace_format: TraceFormat | None = None) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, trace_format)


def facts(trace: Trace) -> list[tuple[float, int, int]]:
    return [(round(row.at_s, 6), row.input_len, row.output_len) for row in trace.requests]


@pytest.mark.parametrize(
    ("text", "trace_format", "rows", "block_tokens"),
    [
        (MOONCAKE, "mooncake", [(0, 6955, 52), (3.053, 6472, 26)], 512),
        (PAGES, "mooncake", [(0, 40, 132), (1.386, 50, 80)], 16),
        (BAILIAN, "vllm", [(0, 40, 132), (1386.0, 50, 80)], 16),
        (LOG, "router", [(0, 63, 40), (0.1, 130, 16), (0.1, 130, 5), (0.1, 100, 7)], 64),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "",
)
def test_every_format(
    tmp_path: Path, text: str, trace_format: str, rows: list[tuple[float, int, int]], block_tokens: int
) -> None:
    trace = read(tmp_path, text)
    assert (facts(trace), trace.requests[0].block_tokens) == (rows, block_tokens)
    assert read(tmp_path, text, TraceFormat(trace_format)) == trace
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed) == trace
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"trace\.gz: "):
        read_trace(packed)


def test_a_log_may_begin_with_a_progress_bar(tmp_path: Path) -> None:
    """Its line has carriage returns inside, which no header of a CSV has."""
    assert read(tmp_path, "Fetching:   0%\rFetching: 100%\n" + LOG) == read(tmp_path, LOG)


def test_prefixes_are_those_of_the_ids(tmp_path: Path) -> None:
    assert shared_tokens(read(tmp_path, MOONCAKE).requests) == 12 * 512
    assert shared_tokens(read(tmp_path, PAGES).requests) == 2 * 16
    assert shared_tokens(read(tmp_path, LOG).requests) == 130 // 64 * 64 + 64, (
        "one more choice, one more prompt"
    )
    lone = read(tmp_path, NO_IDS)
    assert shared_tokens(lone.requests) == 0
    assert "share a prefix" in lone.remarks[0]
    first, second = read(tmp_path, MOONCAKE).requests
    assert first.input_ids()[: 12 * 512] == second.input_ids()[: 12 * 512]
    assert first.input_ids()[12 * 512] != second.input_ids()[12 * 512]
    assert len(second.input_ids()) == 6472


def test_blocks_that_no_id_names_are_shared_with_none(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 600, "output_length": 1, "hash_ids": [5, 6]} for at in (0, 7)]
    rows[1].pop("hash_ids")
    trace = read(tmp_path, "\n".join(map(json.dumps, rows)))
    (named, own) = trace.requests
    assert len(own.blocks) == len(named.blocks) == 2 and not set(own.blocks) & set(named.blocks)


def test_time_out_of_order_is_sorted(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 5, "output_length": 1} for at in (3, 1, 2)]
    text = "\n".join(map(json.dumps, rows))
    trace = read(tmp_path, text)
    assert [row.at_s for row in trace.requests] == [0, 0.001, 0.002]
    assert [row.at_s for row in read(tmp_path, text, TraceFormat.VLLM).requests] == [0, 1, 2]


def test_what_a_log_cannot_tell_is_remarked(tmp_path: Path) -> None:
    remarks = " ".join(read(tmp_path, LOG).remarks)
    assert "refused before they had a token: 1." in remarks and "2 keys" in remarks
    assert "without a prompt or an answer are left out: 1." in " ".join(
        read(tmp_path, NO_IDS + NO_IDS.splitlines()[-1].replace(": 8", ": 0")).remarks
    )


DEEP = f'{{"a": {"[" * 100_000}{"]" * 100_000}}}\n'
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        (" \n\n", "it is empty"),
        (GOOD + "\n{oops}", "line 3: "),
        (DEEP + GOOD, "line 1: its JSON is nested too deeply"),
        (GOOD + DEEP, "line 2: its JSON is nested too deeply"),
        (GOOD + GOOD.replace("600", '"600"'), "line 2: Expected `int`, got `str` - at `$.input_length`"),
        (GOOD + GOOD.replace("600", "-1"), "line 2: Expected `int` >= 0 - at `$.input_length`"),
        (GOOD + GOOD.replace("600", "10000001"), "line 2: Expected `int` <= 10000000 - at `$.input_length`"),
        (GOOD + GOOD.replace('"output_length": 1, ', ""), "line 2: Object missing required field `output_len"),
        (GOOD + GOOD.replace("[1, 2]", "[1, 2, 3]"), "line 2: hash_ids has 3 ids for 600 prompt tokens"),
        (GOOD.replace("600", "0").replace("[1, 2]", "[]"), "no request with a prompt and an answer (1 without)"),
        ('{"prompt": "hi", "output_tokens": 5}', "line 1: its fields are of no known trace"),
        ('[{"conversations": []}]', "line 1: its fields are of no known trace"),
        (LOG.replace("arrived_ms=1763935383020", "arrived_ms=x"), "line 7: Expected `float`, got `str` - at `$.arr"),
        (LOG.replace("prompt_lens=63", "prompt_lens=63;9"), "line 7: prompt_lens, output_lens and prefixes must"),
        (LOG.replace("AAAAAAAAAAE=", "AAAA"), "line 3: prefixes has 'AAAA', and must be base64 of 8 bytes for"),
        (LOG.replace("tokens=64 prefix_key=2e", "tokens=32 prefix_key=2e"), "line 7: prefix_tokens is 32, after 64"),
    ],
)  # fmt: skip
def test_bad_input_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"--trace {tmp_path / 'trace'}") and words in str(error.value)


def test_a_prompt_may_have_as_many_tokens_as_is_said(tmp_path: Path) -> None:
    most = 10_000_000
    assert facts(read(tmp_path, NO_IDS.replace("3180", str(most))))[1] == (0.052, most, 8)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
