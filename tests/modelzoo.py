"""Tiny random models in Hugging Face's format, and transformers' answers on them.

The weights are drawn so that greedy outputs are diverse: a model that repeats one token would hide a wrong page,
position or batch row. transformers is imported only inside the functions, since that takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

MIXTURES = ("qwen3moe", "olmoe", "mixtral", "gptoss")
ARCHITECTURES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma3", *MIXTURES)

EOS_TOKEN = "<|endoftext|>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
EOS_TOKEN_ID, IM_START_ID, IM_END_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TRAINING_TEXT = """
A router takes the request and counts its words; a prefill node reads the prompt, and a decode node writes the answer.
When the pages have arrived, the stream begins. When a node has gone, another takes its place, and the reader sees
nothing but the next word. The quick brown fox jumps over the lazy dog, 0123456789 times, while the kettle boils.
def main(): return {"prompt": "Once upon a time", "max_tokens": 16, "stream": true}
Memory is a shelf of pages: some are free, some are held, some are shared between those who began with the same words.
"""

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}


def make_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny model of one of ARCHITECTURES, with its tokenizer, and return `folder`.

    `overrides` are config.json's fields (`tie_word_embeddings=True`, `num_hidden_layers=1`, ...). A
    `max_shard_size` such as "100KB" splits the weights and writes their index. config.json names one EOS id and
    generation_config.json two, as Qwen's do.
    """
    with _quiet_transformers() as transformers:
        model = transformers.AutoModelForCausalLM.from_config(_config(transformers, architecture, overrides))
        _draw_weights(model, seed)
        model.to(getattr(torch, dtype))
        model.generation_config = transformers.GenerationConfig(eos_token_id=[EOS_TOKEN_ID, IM_END_ID])
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, vocab_size=model.config.get_text_config().vocab_size)
    return folder


def write_tokenizer(folder: Path, *, vocab_size: int = 512) -> None:
    """Write a byte-level BPE tokenizer of at most `vocab_size` (at least 260) tokens, with a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    assert vocab_size >= 260, "a byte-level tokenizer needs 256 bytes and the special tokens"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (EOS_TOKEN, IM_START, IM_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": EOS_TOKEN,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """`length` token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(IM_END_ID + 1, vocab_size, (length,), generator=generator).tolist()
    return ids


def reference_greedy(folder: Path, input_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens by transformers in float32, of which none ends the list.

    The model is loaded once per folder, so write a folder only once.
    """
    (output_ids,) = reference_greedy_batch(folder, [input_ids], max_new_tokens)
    return output_ids


def reference_greedy_batch(
    folder: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The same for several prompts. Those of one length are computed at once, in a fraction of the time."""
    model = _reference_model(folder)
    outputs: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        alike = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[i]) for i in alike])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=EOS_TOKEN_ID,
        )
        outputs |= zip(alike, generated[:, length:].tolist(), strict=True)
    return [outputs[i] for i in range(len(prompts))]


def is_decided(folder: Path, input_ids: Sequence[int], output_ids: Sequence[int]) -> bool:
    """Whether no greedy token was chosen by less than what another order of float32 sums may change."""
    logits = reference_logits(folder, [*input_ids, *output_ids])[len(input_ids) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    return bool((first - second).min() > 1e-4)


def reference_logits(folder: Path, input_ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of every position, by transformers in float32."""
    with torch.inference_mode():
        logits: torch.Tensor = _reference_model(folder)(
            torch.tensor([list(input_ids)]), use_cache=False
        ).logits[0]
    return logits


@lru_cache(maxsize=16)
def _reference_model(folder: Path) -> Any:
    with _quiet_transformers() as transformers:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        model.generation_config.eos_token_id = None
        return model.float().eval()


def _config(transformers: Any, architecture: str, overrides: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = _SIZES | overrides
    match architecture:
        case "llama":
            return transformers.LlamaConfig(**sizes)
        case "llama3":
            return transformers.LlamaConfig(
                **{"rope_scaling": dict(_LLAMA3_ROPE), "rope_theta": 500_000.0, **sizes}
            )
        case "mistral":
            return transformers.MistralConfig(**{"sliding_window": 24, **sizes})
        case "qwen2":
            return transformers.Qwen2Config(**{"rope_theta": 1_000_000.0, **sizes})
        case "qwen3":
            return transformers.Qwen3Config(**{"head_dim": 32, **sizes})
        case "gptoss":
            own = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 24}
            return transformers.GptOssConfig(**{**own, "rope_scaling": dict(_YARN), **sizes})
        case "qwen3moe":
            own = {
                "head_dim": 32,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
            }
            return transformers.Qwen3MoeConfig(**_EXPERTS | own | sizes)
        case "olmoe":
            return transformers.OlmoeConfig(**_EXPERTS | sizes)
        case "mixtral":
            own = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
            return transformers.MixtralConfig(**own | sizes)
        case "phi3":
            parts = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}
            rope = {"rope_scaling": dict(_LONGROPE), **parts}
            return transformers.Phi3Config(**{**rope, **sizes})
        case "glm":
            return transformers.GlmConfig(**{"head_dim": 32, **sizes})
        case "glm4":
            return transformers.Glm4Config(**{"head_dim": 32, **sizes})
        case "gemma3":
            own = {
                "head_dim": 32,
                "query_pre_attn_scalar": 24,
                "sliding_window": 24,
                "sliding_window_pattern": 2,
            }
            return transformers.Gemma3TextConfig(**own | sizes)
        case "gemma3_images":
            vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
            vision |= {"num_attention_heads": 2, "image_size": 28}
            text = _config(transformers, "gemma3", overrides)
            return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    raise ValueError(f"{architecture!r} is none of {ARCHITECTURES}")


def _draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_spread(name, noise))


def _spread(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return 0.3 * noise
    # A wide residual branch lets attention and MLP outweigh the last token's own embedding, so that tied models
    # do not repeat it.
    gain = 3.0 if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")) else 2.0
    return noise * (gain / math.sqrt(noise.shape[-1]))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """transformers, with its progress bars off."""
    import transformers

    logging: Any = transformers.utils.logging
    bars_were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        if bars_were_on:
            logging.enable_progress_bar()
