"""Small models in the formats of quantized checkpoints, and the dense model that each of them stands for.

compressed-tensors files are written by its own compressors. AWQ and GPTQ files are packed here, as AutoAWQ 0.2.9
(`WQLinear_GEMM.from_linear`) and GPTQModel (`pack_original`) pack them: both libraries need a GPU to quantize.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight [N, K] -> (the tensors of its layer, the weight that they stand for)."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def compressed_tensors(
    bits: int,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    activations: bool = False,
    order: bool = False,
    ignore: tuple[str, ...] = ("lm_head",),
) -> tuple[dict[str, Any], Quantize]:
    """W8A8 with `activations` (int-quantized), else weights alone (pack-quantized)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy="group" if group_size else "channel",
        group_size=group_size,
    )
    inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if activations else None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    name = "int-quantized" if activations else "pack-quantized"
    compressor = BaseCompressor.get_value_from_registry(name)

    def quantize(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight_NK.shape
        order_K = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if order else torch.arange(k)
        groups = weight_NK[:, order_K].reshape(n, -1, group_size or k)
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), weights)
        state = {"weight": weight_NK, "weight_scale": scale, "weight_zero_point": zero}
        if order:
            g_idx = torch.empty(k, dtype=torch.int32)
            g_idx[order_K] = (torch.arange(k) // (group_size or k)).to(torch.int32)
            # The compressor knows no order: it gets the columns of each group side by side.
            state["weight"] = weight_NK[:, order_K].contiguous()
        packed = compressor.compress(state, scheme)
        dense = compressor.decompress(packed, scheme)["weight"].float()
        if order:
            codes = _repacked(packed["weight_packed"], bits, order_K)
            packed |= {"weight_packed": codes, "weight_g_idx": g_idx}
            dense = dense[:, torch.argsort(order_K)]
        return packed, dense

    group = scheme.model_dump(mode="json") | {"format": name}
    if order:  # which versions before 0.20 wrote
        group["weights"]["actorder"] = "group"
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }
    return config, quantize


def fp8(strategy: str) -> tuple[dict[str, Any], Quantize]:
    """compressed-tensors' float-quantized by tensor, channel or block, or blocks as transformers writes them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    sizes = {"block": [48, 48], "transformers": [48, 32]}.get(strategy)
    weights = QuantizationArgs(
        num_bits=8,
        type="float",
        strategy="block" if sizes else strategy,
        block_structure=sizes,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")

    def quantize(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight_NK.shape
        rows, columns = {"tensor": (n, k), "channel": (1, k)}.get(strategy, sizes)
        padded = torch.nn.functional.pad(weight_NK, (0, -k % columns, 0, -n % rows))
        blocks = padded.reshape(-(-n // rows), rows, -(-k // columns), columns)
        scale = blocks.abs().amax((1, 3)) / 448
        scale = scale.reshape(1) if strategy == "tensor" else scale
        packed = compressor.compress({"weight": weight_NK, "weight_scale": scale}, scheme)
        dense = compressor.decompress(packed, scheme)["weight"].float()
        if strategy == "transformers":
            packed["weight_scale_inv"] = packed.pop("weight_scale")
        return packed, dense

    group = scheme.model_dump(mode="json") | {"format": "float-quantized"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    if strategy == "transformers":
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": sizes}
    return config, quantize


def awq(group_size: int) -> tuple[dict[str, Any], Quantize]:
    """AWQ's layout of asymmetric 4-bit weights; they are rounded to the nearest here."""

    def quantize(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes_NK, zeros_NG, scales_NG = _asymmetric(weight_NK, 4, group_size)
        packed = {
            "qweight": _words(codes_NK.T[:, _in_awq_order(len(codes_NK))], 4),
            "qzeros": _words(zeros_NG.T[:, _in_awq_order(len(codes_NK))], 4),
            "scales": scales_NG.T.contiguous(),
        }
        return packed, _dense(codes_NK, zeros_NG, scales_NG)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }
    return config, quantize


def gptq(
    bits: int, group_size: int, *, desc_act: bool = False, version: str = "gptq"
) -> tuple[dict[str, Any], Quantize]:
    """GPTQ's layout; with `desc_act` the inputs of a group lie anywhere. Rounded to the nearest here."""

    def quantize(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        k = weight_NK.shape[1]
        size = group_size if group_size > 0 else k
        order_K = (
            torch.randperm(k, generator=torch.Generator().manual_seed(k)) if desc_act else torch.arange(k)
        )
        codes_NK, zeros_NG, scales_NG = _asymmetric(weight_NK[:, order_K], bits, size)
        back = torch.argsort(order_K)
        g_idx = (torch.arange(k) // size)[back].to(torch.int32)
        stored = zeros_NG - 1 if version == "gptq" else zeros_NG
        packed = {
            "qweight": _words(codes_NK[:, back], bits).T.contiguous(),
            "qzeros": _words(stored.T & ((1 << bits) - 1), bits),
            "scales": scales_NG.T.contiguous(),
            "g_idx": g_idx,
        }
        return packed, _dense(codes_NK, zeros_NG, scales_NG)[:, back]

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "sym": False,
        "checkpoint_format": version,
    }
    return config, quantize


def mxfp4() -> tuple[dict[str, Any], Quantize]:
    """Experts [E, K, N] in MXFP4, rounded to the nearest. What they stand for is transformers' own reading."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    numbers = torch.tensor(FP4_VALUES)

    def quantize(weight_EKN: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups_ENGK = weight_EKN.transpose(1, 2).unflatten(2, (-1, 32))
        exponents_ENG = groups_ENGK.abs().amax(3).clamp(min=1e-30).log2().floor() - 2
        scaled = groups_ENGK / exponents_ENG.exp2()[..., None]
        codes = (scaled[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
        blocks, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents_ENG + 127).to(torch.uint8)
        stands_for = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return {"blocks": blocks, "scales": scales}, stands_for

    return {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }, quantize


def quantize_folder(
    dense: Path,
    folder: Path,
    how: tuple[dict[str, Any], Quantize],
    *,
    lm_head: bool = False,
    keep_dense: bool = True,
) -> Path:
    """Write `dense` into `folder` with its projections quantized, and into `folder`/dense what these stand for.

    Where experts share tensors, these are quantized alone. Without `keep_dense` the second model is left out.
    """
    config, quantize = how
    folder.mkdir(parents=True, exist_ok=True)
    tensors, stands_for = Tensors(), Tensors()
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, is_shared = name.removesuffix(".weight"), config["quant_method"] == "mxfp4"
        is_linear = layer.endswith(("_proj", ".w1", ".w2", ".w3")) or (lm_head and layer == "lm_head")
        if is_linear and (tensor.dim() == 3 or not is_shared):
            packed, stood_for = quantize(tensor.float())
            if keep_dense:
                stands_for[name] = stood_for
            dot = "_" if is_shared else "."
            tensors |= {f"{layer}{dot}{each}": value.contiguous() for each, value in packed.items()}
        else:
            tensors[name] = stands_for[name] = tensor
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(dense / name, folder)
    settings = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not keep_dense:
        return folder
    shutil.copytree(dense, folder / "dense")
    contiguous = {name: value.contiguous() for name, value in stands_for.items()}
    save_file(contiguous, folder / "dense" / "model.safetensors", {"format": "pt"})
    return folder


def _asymmetric(
    weight_NK: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups_NGK = weight_NK.reshape(len(weight_NK), -1, group_size)
    least, most = groups_NGK.amin(2).clamp(max=0), groups_NGK.amax(2).clamp(min=0)
    scales_NG = ((most - least) / ((1 << bits) - 1)).clamp(min=1e-6).half()
    zeros_NG = torch.round(-least / scales_NG.float()).clamp(1, (1 << bits) - 1).int()
    codes_NGK = torch.round(groups_NGK / scales_NG.float()[..., None]) + zeros_NG[..., None]
    return codes_NGK.clamp(0, (1 << bits) - 1).int().flatten(1), zeros_NG, scales_NG


def _dense(codes_NK: torch.Tensor, zeros_NG: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    size = codes_NK.shape[1] // scales_NG.shape[1]
    return (codes_NK - zeros_NG.repeat_interleave(size, 1)) * scales_NG.float().repeat_interleave(size, 1)


def _in_awq_order(n: int) -> torch.Tensor:
    return (torch.arange(0, n, 8)[:, None] + torch.tensor(_AWQ_ORDER)).flatten()


def _words(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes side by side in words of 32 bits, the first one lowest."""
    in_words = codes_RC.to(torch.int64).reshape(len(codes_RC), -1, 32 // bits)
    words = (in_words << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _repacked(words_NW: torch.Tensor, bits: int, order_K: torch.Tensor) -> torch.Tensor:
    """The same codes with those of column order_K[i], which are at i, at their column."""
    codes = (words_NW[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
    return _words(codes.flatten(1)[:, torch.argsort(order_K)], bits)
