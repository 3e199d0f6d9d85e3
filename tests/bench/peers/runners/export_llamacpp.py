"""Write a model as GGUF. argv: MODEL FOLDER FORMAT, which is BF16 or one that llama.cpp quantizes to.

Its own converter wants a tokenizer that it knows; these models have none to speak of. What becomes of the tensors is
as its `convert_hf_to_gguf.py` has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import torch
from safetensors import safe_open

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}


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
    """As it is: in bfloat16, and experts in MXFP4 if they are shipped so."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
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
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "rope_scaling" in config:
        scaling = config["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        size = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(size)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    with safe_open(model / "model.safetensors", "pt") as file:
        for name, tensor in tensors(file, config):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if tensor.dtype == torch.uint8:
                writer.add_tensor(target, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            elif tensor.dim() == 1 or name.endswith((".bias", "mlp.gate.weight", "mlp.router.weight")):
                writer.add_tensor(target, tensor.float().numpy())
            else:
                bits = tensor.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(target, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(file: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the checkpoint, as llama.cpp wants them."""
    kind = config["model_type"]
    for name in file.keys():  # noqa: SIM118  a file is no mapping
        if ".mlp.experts." in name:
            yield from (gpt_oss_experts if kind == "gpt_oss" else qwen3_experts)(file, name, config)
            continue
        tensor = file.get_tensor(name)
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = adjacent_pairs(tensor, config["head_dim"])
        if kind == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        yield name + ".weight" * name.endswith("sinks"), tensor


def qwen3_experts(file: Any, name: str, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """All of a layer in one tensor, where the first one is met."""
    mlp, _, rest = name.partition(".experts.")
    if rest.startswith("0."):
        all_ = (f"{mlp}.experts.{e}.{rest[2:]}" for e in range(config["num_experts"]))
        yield f"{mlp}.experts.{rest[2:]}", torch.stack([file.get_tensor(each) for each in all_])


def gpt_oss_experts(file: Any, name: str, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """gate and up on their own; a group of MXFP4 as its scale, then 16 bytes: element i lower and i + 16 higher."""
    layer, _, part = name.rpartition("_")
    if part == "scales":
        return
    tensor = file.get_tensor(name)
    if part == "blocks":
        codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2)
        scales = file.get_tensor(f"{layer}_scales")[..., None]
        tensor = torch.cat([scales, codes[..., :16] | codes[..., 16:] << 4], -1).flatten(2)
    suffix = "bias" if part == "bias" else "weight"
    if layer.endswith("gate_up_proj"):
        for i, each in enumerate(("gate_proj", "up_proj")):
            yield layer.replace("gate_up_proj", f"{each}.{suffix}"), tensor[:, i::2].contiguous()
    else:
        yield f"{layer}.{suffix}", tensor


def adjacent_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Its llama rotates dims (2 i, 2 i + 1), and Hugging Face's (i, i + head_dim / 2)."""
    heads = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
