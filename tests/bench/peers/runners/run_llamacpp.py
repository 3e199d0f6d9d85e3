"""llama.cpp: `llama_decode` on batches of all sequences, as its server does. argv: FOLDER THREADS KV_TOKENS.

What all prompts begin with is computed once, as its examples do with `llama_memory_seq_cp`.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import llama_cpp
import numpy as np
from lines import Answers, claim_output, serve

BATCH, MAX_SEQUENCES = 2048, 32
Entry = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are wanted."""


class Model:
    """A model with one KV cache for all sequences."""

    def __init__(self, path: Path, num_threads: int, kv_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_seq_max = kv_tokens, BATCH, MAX_SEQUENCES
        context.n_threads = context.n_threads_batch = num_threads
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        assert self._context is not None
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def forget(self) -> None:
        """Empty the KV cache."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def share(self, source: int, target: int) -> None:
        """Give a sequence all tokens of another one."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def decode(self, entries: list[Entry]) -> list[tuple[int, int]]:
        """Compute entries, and return (sequence, likeliest next token) of those whose logits are wanted."""
        found = []
        for first in range(0, len(entries), BATCH):
            part, batch = entries[first : first + BATCH], self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    logits = llama_cpp.llama_get_logits_ith(self._context, i)
                    found.append((sequence, int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())))
        return found


def num_shared(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def main() -> None:
    output = claim_output()
    path = next(Path(sys.argv[1]).glob("*.gguf"))
    model = Model(path, int(sys.argv[2]), int(sys.argv[3]))

    def generate(prompts: list[list[int]], max_new_tokens: int) -> Answers:
        answers = Answers(len(prompts))
        model.forget()
        shared = num_shared(prompts) if len(prompts) > 1 else 0
        model.decode([(prompts[0][at], at, 0, False) for at in range(shared)])
        for sequence in range(1, len(prompts)):
            model.share(0, sequence)
        entries = [
            (token, at, sequence, at + 1 == len(prompt))
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= shared
        ]
        for step in range(max_new_tokens):
            sampled = model.decode(entries)
            for sequence, token in sampled:
                answers.add(sequence, [token])
            entries = [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in sampled]
        return answers

    serve(output, f"{version('llama-cpp-python')} (bindings)", generate)


if __name__ == "__main__":
    main()
