"""guidellm on synthetic text, made with the built-in model's tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checks import MODEL, MODEL_FOLDER, URL, check, main, run_tool

NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 12, 64, 24
GUIDELLM = Path(sys.executable).with_name("guidellm")


def bench(name: str, profile: str, backend: str = "") -> dict[str, Any]:
    """One run; every request must have succeeded, with as many tokens as were asked for."""
    out = Path(f"{name}.json")
    run_tool(
        *(str(GUIDELLM), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL}{backend}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_FOLDER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={out}"),
    )
    (result,) = json.loads(out.read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert totals["successful"] == NUM_REQUESTS and totals["errored"] == totals["incomplete"] == 0, totals
    requests: list[dict[str, Any]] = result["requests"]["successful"]
    assert [request["output_tokens"] for request in requests] == [OUTPUT_LEN] * NUM_REQUESTS
    assert all(request["time_to_first_token_ms"] > 0 for request in requests)
    return dict(result)


@check
def chat_with_four_streams() -> None:
    bench("chat", "kind=concurrent,streams=4")


@check
def completions_one_after_the_other() -> None:
    result = bench("completions", "kind=synchronous", ",request_format=/v1/completions")
    lengths = [request["prompt_tokens"] for request in result["requests"]["successful"]]
    assert max(lengths) - min(lengths) <= INPUT_LEN // 8 and min(lengths) >= INPUT_LEN - 2, lengths


@check
def poisson_arrivals() -> None:
    bench("poisson", "kind=poisson,rate=4")


if __name__ == "__main__":
    main()
