"""vLLM: the offline `LLM`, with its defaults but for the size of the KV pool. argv: MODEL THREADS KV_TOKENS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lines import Answers, claim_output, serve


def main() -> None:
    output = claim_output()
    folder, kv_tokens = sys.argv[1], int(sys.argv[3])
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    import vllm

    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        max_model_len=4096,
        kv_cache_memory_bytes=kv_nbytes(folder, kv_tokens),
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> Answers:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        answers = Answers(len(prompts))
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for index, done in enumerate(llm.generate(asked, params, use_tqdm=False)):
            metrics = done.metrics
            decoding_s = metrics.last_token_ts - metrics.first_token_ts
            answers.output_ids[index] = list(done.outputs[0].token_ids)
            answers.first_token_s[index] = metrics.first_token_latency
            answers.end_s[index] = metrics.first_token_latency + decoding_s
        return answers

    serve(output, vllm.__version__, generate)


def kv_nbytes(folder: str, num_tokens: int) -> int:
    """Of the K and V of so many tokens in bfloat16."""
    config = json.loads((Path(folder) / "config.json").read_text())
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    return int(num_tokens * config["num_hidden_layers"] * per_layer)


if __name__ == "__main__":
    main()
