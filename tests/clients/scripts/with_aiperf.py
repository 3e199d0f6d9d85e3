"""aiperf (NVIDIA's successor of genai-perf) on synthetic text, made with the built-in model's tokenizer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, MODEL_FOLDER, URL, check, main, run_tool

NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 12, 64, 24
AIPERF = Path(sys.executable).with_name("aiperf")


def bench(endpoint: str) -> None:
    """One run; every request must have succeeded, with as many tokens as were asked for.

    The server's counts are asked for: a sampled text often has another number of tokens when it is tokenized again.
    """
    out = Path(endpoint)
    run_tool(
        *(str(AIPERF), "profile", "--model", MODEL, "--tokenizer", str(MODEL_FOLDER), "--url", URL),
        *("--endpoint-type", endpoint, "--streaming", "--concurrency", "4"),
        *("--request-count", str(NUM_REQUESTS), "--random-seed", "1", "--ui", "none"),
        *("--isl", str(INPUT_LEN), "--isl-stddev", "0", "--osl", str(OUTPUT_LEN), "--osl-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
        *("--output-artifact-dir", str(out)),
    )
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == NUM_REQUESTS
    assert not any(record.get("error") for record in records), records
    lengths = [_value(record, "output_sequence_length") for record in records]
    assert lengths == [OUTPUT_LEN] * NUM_REQUESTS, lengths
    assert all(_value(record, "time_to_first_token") > 0 for record in records)


def _value(record: dict[str, Any], name: str) -> float:
    value: float = record["metrics"][name]["value"]
    return value


@check
def chat() -> None:
    bench("chat")


@check
def completions() -> None:
    bench("completions")


@check
def it_reads_the_routers_metrics() -> None:
    scraped = (Path("chat") / "server_metrics_export.json").read_text()
    for name in ("sglang:time_to_first_token_seconds", "sglang:num_running_reqs", "sglang:generation_tokens"):
        assert name in scraped, name


if __name__ == "__main__":
    os.environ.pop("HF_HUB_OFFLINE", None)  # offline, it takes a folder's path for the name of a repository
    main()
