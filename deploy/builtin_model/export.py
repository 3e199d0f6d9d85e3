"""Writes the built-in model as a Hugging Face folder, and compares it with transformers."""

import json
from pathlib import Path

import torch
from corpus import EOT, EOT_ID
from llama import Llama, ModelConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

# User and system turns become comment lines, assistant turns are code. The generation prompt is a newline.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{ message['content'] }}"
    "{%- else -%}{{ '# ' + message['content'].replace('\\n', '\\n# ') }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n' }}{%- endif -%}"
)


def export_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """Write tokenizer.json, and two files with its special token and its chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    write_json(folder / "special_tokens_map.json", special)
    extra = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", special | extra)


def export_model(model: Llama, cfg: ModelConfig, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights in bf16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_len,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": EOT_ID,
        "eos_token_id": EOT_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": EOT_ID, "eos_token_id": EOT_ID})
    weights = {f"model.{name}": p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def import_model(model: Llama, folder: Path) -> None:
    """Load the weights of a folder into `model`."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})


def write_json(path: Path, content: object) -> None:
    """Write `content`, indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def verify_export(folder: Path, cfg: ModelConfig, docs: list[Tensor]) -> None:
    """Assert that transformers computes from the folder the same logits as `Llama`, at every position."""
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = Llama(cfg)
    ours.load_state_dict(theirs.model.state_dict())
    ids_BS = torch.cat(docs)[None, : cfg.max_len]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids_BS).logits, ours(ids_BS), atol=1e-3, rtol=1e-3)
