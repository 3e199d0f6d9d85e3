"""transformers: `generate` on one batch of all prompts, which have the same length. argv: MODEL THREADS KV_TOKENS.

Its KV cache grows as needed and there is no prefix cache, so KV_TOKENS is not used.
"""

from __future__ import annotations

import sys

import torch
import transformers
from lines import Answers, claim_output, serve


class Watch(transformers.generation.streamers.BaseStreamer):
    """Is told every step's tokens of the whole batch; of the first call, the prompts."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._saw_prompts = False

    def put(self, token_ids: torch.Tensor) -> None:
        if self._saw_prompts:
            for index, token_id in enumerate(token_ids.tolist()):
                self._answers.add(index, [token_id])
        self._saw_prompts = True

    def end(self) -> None:
        pass


def main() -> None:
    output = claim_output()
    folder, num_threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_new_tokens: int) -> Answers:
        answers = Answers(len(prompts))
        input_ids = torch.tensor(prompts)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            streamer=Watch(answers),
        )
        return answers

    serve(output, transformers.__version__, generate)


if __name__ == "__main__":
    main()
