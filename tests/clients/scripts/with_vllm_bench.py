"""`vllm bench serve`, from a vLLM that was installed without its engine (VLLM_TARGET_DEVICE=empty)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, MODEL_FOLDER, URL, check, main, run_tool

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 12, 64, 24
VLLM = Path(sys.executable).with_name("vllm")


def bench(backend: str, endpoint: str, *flags: str) -> dict[str, Any]:
    """One run; every request must have succeeded, with as many tokens as were asked for."""
    out = Path(f"{backend}.json")
    run_tool(
        *(str(VLLM), "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", URL),
        *("--model", MODEL, "--tokenizer", str(MODEL_FOLDER), "--dataset-name", "random"),
        *("--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN), "--ignore-eos"),
        *("--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", ".", "--result-filename", str(out)),
        *flags,
    )
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["completed"] == NUM_PROMPTS and result["failed"] == 0
    assert not any(result["errors"]), result["errors"]
    assert result["output_lens"] == [OUTPUT_LEN] * NUM_PROMPTS
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0
    return result


@check
def completions() -> None:
    result = bench("openai", "/v1/completions", "--logprobs", "1")
    assert result["input_lens"] == [INPUT_LEN] * NUM_PROMPTS


@check
def chat() -> None:
    bench("openai-chat", "/v1/chat/completions", "--temperature", "0.8", "--top-k", "20")


if __name__ == "__main__":
    main()
