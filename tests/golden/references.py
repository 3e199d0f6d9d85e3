"""What every golden test compares with: plain loops over transformers, computed once per prompt and session."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.model.config import load_model_config
from shared.model.files import resolve_model
from shared.protocol.sampling_params import SamplingParams
from tests.modelzoo import (
    ARCHITECTURES,
    EOS_TOKEN_ID,
    IM_END_ID,
    make_model,
    random_prompt,
    reference_greedy_batch,
    reference_logits,
)
from tests.quantized_models import compressed_tensors, mxfp4, quantize_folder
from tests.unit.engine.naive_sampler import naive_penalize, naive_sample

MODELS = (*ARCHITECTURES, "builtin")
EOS_IDS = (EOS_TOKEN_ID, IM_END_ID)
"""Of the random models."""
NUM_PROMPTS = 24
NUM_NEW = 32

_CODE_SEED = 352
"""Of the order of lines in the built-in model's prompts: with this one it does not fall into repeating itself."""
_LINES_OF_CODE = [
    "import os",
    "from collections import deque",
    "class Reader(io.RawIOBase):",
    "    def __init__(self, path, mode='r', encoding=None):",
    "        self.path = os.fspath(path)",
    "        super().__init__()",
    "    def read(self, size=-1):",
    "        if self.closed:",
    "            raise ValueError('I/O operation on closed file.')",
    "        with self._lock:",
    "            data = self._buffer[self._pos:self._pos + size]",
    "        return data",
    "def parse(text, *, strict=True):",
    '    """Return a list of (key, value) pairs."""',
    "    for i, line in enumerate(text.splitlines()):",
    "        key, sep, value = line.partition('=')",
    "        try:",
    "            result[key.strip()] = int(value, 16)",
    "        except ValueError as exc:",
    "            msg = f'line {i}: {exc}'",
    "    return sorted(result, key=len)",
    "async def main():",
    "    loop = asyncio.get_running_loop()",
    "    while not queue.empty():",
    "        await asyncio.sleep(0.1)",
    "        # The socket may have been closed in the meantime.",
    "    print('done', file=sys.stderr)",
    "if __name__ == '__main__':",
    "    sys.exit(main())",
]


@dataclass
class Zoo:
    """Model folders, prompts and greedy references, each made once."""

    root: Path
    sizes: dict[str, int] = field(default_factory=dict)
    """Fields of config.json in which the random models differ from those of tests.modelzoo."""
    _prompts: dict[str, list[list[int]]] = field(default_factory=dict)
    _greedy: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def folder(self, model: str) -> Path:
        if model == "builtin":
            return resolve_model("builtin")  # a ModelError, and so a failure, when the checkout lacks it
        folder = self.root / model
        if folder.exists():
            return folder
        if model == "qwen3-w8a8":
            return quantize_folder(self.folder("qwen3"), folder, compressed_tensors(8, activations=True))
        if model == "gptoss-mxfp4":
            return quantize_folder(self.folder("gptoss"), folder, mxfp4())
        return make_model(folder, model, **self.sizes)

    def prompts(self, model: str) -> list[list[int]]:
        """Prompts of 60, 80, .. 200 tokens that share no first token, so that none is a prefix hit of another.

        20 divides every length; 16 and 23 do not divide most of them.
        """
        if model not in self._prompts:
            lengths = [60 + 20 * (i % 8) for i in range(NUM_PROMPTS)]
            if model == "builtin":
                self._prompts[model] = self._code(lengths)
            else:
                self._prompts[model] = [
                    [3 + i, *random_prompt(length - 1, seed=100 + i)] for i, length in enumerate(lengths)
                ]
        return self._prompts[model]

    def greedy(self, model: str, i: int) -> list[int]:
        """NUM_NEW greedy tokens after prompt i, whatever they are."""
        if (model, i) not in self._greedy:
            prompts = self.prompts(model)
            alike = [j for j, prompt in enumerate(prompts) if len(prompt) == len(prompts[i])]
            outputs = reference_greedy_batch(self.folder(model), [prompts[j] for j in alike], NUM_NEW)
            self._greedy |= {(model, j): output for j, output in zip(alike, outputs, strict=True)}
        return self._greedy[model, i]

    def with_eos(self, model: str, eos_ids: Sequence[int]) -> Path:
        """The same model, with other tokens as its end of sequence."""
        folder = self.root / f"{model}-eos-{'-'.join(map(str, eos_ids))}"
        if not folder.exists():
            shutil.copytree(self.folder(model), folder)
            path = folder / "generation_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(eos_ids)}))
        return folder

    def _code(self, lengths: list[int]) -> list[list[int]]:
        """Lines of Python in random order, which is what the built-in model has learnt to go on with."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder("builtin") / "tokenizer.json"))
        starts = iter(range(20, 20 + len(lengths)))
        prompts = []
        for i, length in enumerate(lengths):
            rng = random.Random(_CODE_SEED + i)
            ids: list[int] = [next(starts)]
            while len(ids) < length:
                ids += tokenizer.encode(rng.choice(_LINES_OF_CODE) + "\n").ids
            prompts.append(ids[:length])
        return prompts


def reference_tokens(
    folder: Path,
    input_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: Sequence[int] = EOS_IDS,
) -> list[int]:
    """A plain loop that computes everything anew for each token, with every sampling parameter."""
    output_ids: list[int] = []
    eos = () if params.ignore_eos else tuple(eos_ids)
    ends = {*params.stop_token_ids, *eos}
    while len(output_ids) < params.max_new_tokens:
        logits_V = reference_logits(folder, [*input_ids, *output_ids])[-1].numpy()
        masked = ends if len(output_ids) < params.min_new_tokens else ()
        logits_V = naive_penalize(logits_V, params, input_ids, output_ids)
        output_ids.append(naive_sample(logits_V, params, len(output_ids), masked))
        if output_ids[-1] in ends:
            break
    return output_ids


def reference_entries(
    folder: Path, input_ids: Sequence[int], params: SamplingParams, *, jumps: bool = False
) -> list[list[int]]:
    """A plain loop under a grammar, with a fresh matcher for each token: what is sampled, each with its jump if any.

    Where `min_new_tokens` excludes all that the grammar wants, anything of that may come.
    """
    assert params.grammar is not None
    model = load_model_config(folder)
    compiled = XGrammarBackend.load(folder, model.vocab_size, model.eos_token_ids).compile(params.grammar)
    every, ends = set(range(model.vocab_size)), set(model.eos_token_ids)
    entries: list[list[int]] = []
    while True:
        output_ids = [token for entry in entries for token in entry]
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept, output_ids))
        if matcher.is_terminated or len(output_ids) == params.max_new_tokens:
            return entries
        mask = np.zeros((1, -(-model.vocab_size // 32)), dtype=np.int32)
        matcher.fill_mask(mask, 0)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: model.vocab_size]
        allowed = set(np.nonzero(bits)[0].tolist())
        logits = reference_logits(folder, [*input_ids, *output_ids])[-1].numpy()
        logits = naive_penalize(logits, params, input_ids, output_ids)
        if len(output_ids) < params.min_new_tokens and not params.ignore_eos:
            if allowed <= ends:
                logits = np.zeros_like(logits)
            else:
                allowed -= ends
        token = naive_sample(logits, params, len(output_ids), every - allowed)
        assert matcher.accept(token)
        forced = matcher.forced_tokens()[:-1] if jumps and not matcher.is_terminated else []
        forced = forced[: params.max_new_tokens - len(output_ids) - 1]
        entries.append([token, *(forced if len(forced) >= 3 else [])])
