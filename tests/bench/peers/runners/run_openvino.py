"""OpenVINO GenAI: its continuous batching pipeline, KV cache in bfloat16. argv: IR THREADS KV_TOKENS WEIGHTS.

Activations are quantized by its default (dynamically, in groups) unless weights are bf16.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import Answers, claim_output, serve

BLOCK_SIZE = 32
"""Tokens in a block of the CPU plugin's KV cache."""
BATCHED_TOKENS = 2048
"""Of one step. With its default of 256, 2048 tokens of llama-160m took a fifth more CPU time (Zen 4, two threads)."""


def main() -> None:
    output = claim_output()
    folder, num_threads, kv_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = kv_tokens // BLOCK_SIZE
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "INFERENCE_NUM_THREADS": num_threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    if sys.argv[4] == "bf16":
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    next_id = 0

    def generate(prompts: list[list[int]], max_new_tokens: int) -> Answers:
        nonlocal next_id
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, ignore_eos=True)
        answers = Answers(len(prompts))
        handles = []
        for prompt in prompts:
            handles.append(
                pipeline.add_request(next_id, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            )
            next_id += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    for generated in handle.read().values():
                        answers.add(index, list(generated.generated_ids))
        return answers

    serve(output, genai.__version__, generate)


if __name__ == "__main__":
    main()
