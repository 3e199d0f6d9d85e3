"""How far the native kernels, with quantized weights, are from the model in float32, on text that is new to it."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from deploy.builtin_model.corpus import encode, read_sources
from shared.config import ModelOptions
from shared.engine.future_map import FutureMap
from shared.engine.input_block import ForwardLimits
from shared.engine.progress import Progress
from shared.engine.resolve import resolve_quantization
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.backend_rig import CPU, batch_over, kv_pool, native_model
from tests.quantized_models import Quantize, awq, compressed_tensors, fp8, gptq
from tests.unit.model.dense_ops import DenseOps

PAGE_SIZE = 16
ON_LOAD = {"--quantization int8": "int8", "--quantization int4": "int4"}


def formats(size: int) -> dict[str, Callable[[], tuple[dict[str, Any], Quantize]]]:
    """By name. `size` is that of the larger groups."""
    return {
        "W8A8": lambda: compressed_tensors(8, activations=True),
        "W8A16 channel": lambda: compressed_tensors(8),
        f"W4A16 g{size}": lambda: compressed_tensors(4, group_size=size),
        "W4A16 g32": lambda: compressed_tensors(4, group_size=32),
        f"AWQ g{size}": lambda: awq(size),
        f"GPTQ g{size}": lambda: gptq(4, size),
        "FP8 channel": lambda: fp8("channel"),
        "FP8 blocks": lambda: fp8("transformers"),
    }


def held_out(folder: Path, num_windows: int, length: int) -> list[list[int]]:
    """Windows of the built-in model's held-out text, from this Python's standard library, as a model's tokens."""
    _, texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.cat(encode(tokenizer, texts))
    return [ids[i * length : (i + 1) * length].tolist() for i in range(num_windows)]


def native_logits(
    folder: Path,
    windows: list[list[int]],
    quantization: str | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
    weight_only: bool = False,
) -> torch.Tensor:
    """Logits [tokens, V] of every position of all windows, from decode steps: they have the bits of prefills."""
    options = ModelOptions(quantization=quantization, weight_only_quantization=weight_only)
    config = resolve_quantization(options, load_model_config(folder))
    model = native_model(folder, config, 1, ())
    num_rows, length = len(windows), len(windows[0])
    pages = -(-length // PAGE_SIZE)
    pool = kv_pool(config, 1 + num_rows * pages, PAGE_SIZE, kv_dtype)
    tables = 1 + np.arange(num_rows * pages, dtype=np.int32).reshape(num_rows, pages)
    limits = ForwardLimits(num_rows=num_rows, context_length=length, max_tokens=num_rows)
    logits_RTV = torch.empty(num_rows, length, config.vocab_size)
    with closing(model.bind(pool, Progress(), limits)) as backend:
        future_map = FutureMap(num_rows, CPU)
        for i in range(length):
            each = {row: (i, ids[i : i + 1]) for row, ids in enumerate(windows)}
            forwarded = backend.forward(batch_over(tables, PAGE_SIZE, each, {}), future_map)
            assert forwarded.logits_SV is not None
            logits_RTV[:, i] = forwarded.logits_SV
    return logits_RTV.flatten(0, 1)


def logits_with_fp8(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    """What a GPU with FP8 computes of a file whose weights are FP8, by its definition in torch."""
    config = load_model_config(folder)
    assert config.quantization is not None
    config = replace(config, quantization=config.quantization.kept_float())
    decoder = Decoder.load(Checkpoint(folder), config, dtype=torch.bfloat16, device=CPU)

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        ops = DenseOps(config.num_layers)
        return decoder.logits(decoder.forward(torch.tensor(ids), torch.arange(len(ids)), ops), ops).float()

    return torch.cat([logits(ids) for ids in windows])


def their_logits(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    """Of the same folder by transformers, in float32; activations are quantized where its config says so."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in windows])


@dataclass(frozen=True)
class Distance:
    """From the next-token distributions of the dense model, over all positions."""

    kl: float
    """Nats."""
    perplexity: float
    top1: float
    """The share of positions with the same likeliest token."""

    @classmethod
    def of(cls, logits: torch.Tensor, exact: torch.Tensor, windows: list[list[int]]) -> Distance:
        log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        length = len(windows[0])
        targets = torch.tensor(windows)[:, 1:].flatten()
        of_targets = log_q.view(len(windows), length, -1)[:, :-1].flatten(0, 1).gather(1, targets[:, None])
        top1 = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        return cls(float(kl), float(torch.exp(-of_targets.mean())), float(top1))
