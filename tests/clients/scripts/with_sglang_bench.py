"""SGLang's bench_serving against all three of its SGLang back ends: native, completions and chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, MODEL_FOLDER, URL, check, main, run_tool

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 12, 64, 24
LAUNCHER = Path(__file__).with_name("sglang_bench_serving.py")


def bench(name: str, *flags: str) -> dict[str, Any]:
    """One run; every request must have succeeded, with as many tokens as were asked for."""
    out = Path(f"{name}.jsonl")
    run_tool(
        *(sys.executable, "-W", "ignore", str(LAUNCHER)),
        *("--base-url", URL, "--model", str(MODEL_FOLDER), "--served-model-name", MODEL),
        *("--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--disable-tqdm"),
        *("--output-file", str(out), "--output-details"),
        *flags,
    )
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == NUM_PROMPTS
    assert not any(result["errors"]), result["errors"]
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0
    return result


def random_ids(name: str, backend: str, *flags: str) -> dict[str, Any]:
    lengths = ("--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN))
    result = bench(
        name,
        *("--backend", backend, "--dataset-name", "random-ids", *lengths, "--random-range-ratio", "1"),
        *flags,
    )
    assert result["output_lens"] == [OUTPUT_LEN] * NUM_PROMPTS
    return result


@check
def native_with_token_ids() -> None:
    result = random_ids("native", "sglang", "--tokenize-prompt", "--flush-cache")
    assert result["input_lens"] == [INPUT_LEN] * NUM_PROMPTS
    assert result["server_info"]["max_total_num_tokens"] > 0


@check
def native_with_logprobs() -> None:
    random_ids("logprobs", "sglang", "--return-logprob", "--top-logprobs-num", "2")


@check
def native_without_streaming() -> None:
    """Then it has no inter-token latency to tell."""
    out = Path("whole.jsonl")
    run_tool(
        *(sys.executable, "-W", "ignore", str(LAUNCHER), "--backend", "sglang", "--base-url", URL),
        *("--model", str(MODEL_FOLDER), "--served-model-name", MODEL, "--dataset-name", "random-ids"),
        *("--num-prompts", "4", "--random-input-len", "32", "--random-output-len", "8"),
        *("--random-range-ratio", "1", "--disable-stream", "--output-file", str(out), "--disable-tqdm"),
    )
    result = json.loads(out.read_text())
    assert result["completed"] == 4 and result["total_output_tokens"] == 32


@check
def completions() -> None:
    random_ids("completions", "sglang-oai")


@check
def chat() -> None:
    random_ids("chat", "sglang-oai-chat")


@check
def a_request_rate() -> None:
    random_ids("rate", "sglang", "--request-rate", "8", "--seed", "3")


@check
def shared_prefixes_are_found_in_the_cache() -> None:
    groups = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", str(NUM_PROMPTS // 2))
    lengths = ("--gsp-system-prompt-len", "200", "--gsp-question-len", "16", "--gsp-output-len", "8")
    result = bench(
        "prefixes",
        *("--backend", "sglang", "--dataset-name", "generated-shared-prefix", *groups, *lengths),
        *("--cache-report", "--gsp-send-routing-key"),
    )
    assert result["output_lens"] == [8] * NUM_PROMPTS
    shared = 200 // 16 * 16  # whole pages of a group's system prompt
    assert result["cache_report"]["total_cached_tokens"] >= NUM_PROMPTS // 2 * shared


if __name__ == "__main__":
    main()
