"""Write a bfloat16 model as GGUF. argv: MODEL FOLDER FORMAT, which is BF16 or one that llama.cpp quantizes to.

Its own converter wants a tokenizer that it knows; these models have none to speak of.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import llama_cpp
import torch
from safetensors.torch import load_file

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def main() -> None:
    model, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    dense = folder / "BF16.gguf"
    write_dense(model, dense)
    if name == "BF16":
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    quantized = str(folder / f"{name}.gguf").encode()
    if llama_cpp.llama_model_quantize(str(dense).encode(), quantized, params):
        raise SystemExit(f"llama.cpp does not quantize to {name}")
    dense.unlink()


def write_dense(model: Path, path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        if architecture == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = adjacent_pairs(tensor, config["head_dim"])
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            bits = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def adjacent_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Its llama rotates dims (2 i, 2 i + 1), and Hugging Face's (i, i + head_dim / 2)."""
    heads = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
