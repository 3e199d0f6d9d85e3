"""Quantized checkpoints are read as their libraries read them, and what is wrong is refused with its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelError
from shared.model.checkpoint import Checkpoint
from shared.model.config import ModelConfig, load_model_config
from shared.model.formats.choice import FORMATS as READERS
from shared.model.formats.common import LinearSpec, unpack
from shared.model.linear import DenseLinear, QuantizedLinear, in_groups, quantize_weight
from shared.model.quantization import Layout, Quantization, Scheme, of_dummy_weights, quantize_on_load
from shared.model.weights import DecoderWeights, WeightReader, load_weights, weights_nbytes
from tests.modelzoo import make_model
from tests.quantized_models import Quantize, awq, compressed_tensors, fp8, gptq, quantize_folder

CPU = torch.device("cpu")
X = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Quantize]]] = {
    "w8a8": lambda: compressed_tensors(8, activations=True),
    "w8a8-zeros": lambda: compressed_tensors(8, activations=True, symmetric=False),
    "w8a16": lambda: compressed_tensors(8),
    "w8a16-g32": lambda: compressed_tensors(8, group_size=32),
    "w4a16": lambda: compressed_tensors(4),
    "w4a16-g32": lambda: compressed_tensors(4, group_size=32),
    "w4a16-g32-zeros": lambda: compressed_tensors(4, group_size=32, symmetric=False),
    "w4a16-g32-order": lambda: compressed_tensors(4, group_size=32, order=True),
    "fp8-tensor": lambda: fp8("tensor"),
    "fp8-channel": lambda: fp8("channel"),
    "fp8-block": lambda: fp8("block"),
    "fp8-transformers": lambda: fp8("transformers"),
    "awq": lambda: awq(32),
    "gptq": lambda: gptq(4, 32),
    "gptq-v2": lambda: gptq(4, 32, version="gptq_v2"),
    "gptq-8": lambda: gptq(8, -1),
    "gptq-order": lambda: gptq(4, 32, desc_act=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in each format; qwen2 has biases."""
    root = tmp_path_factory.mktemp("formats")
    dense = make_model(root / "dense", "qwen2", dtype="bfloat16")
    return {name: quantize_folder(dense, root / name, make()) for name, make in FORMATS.items()}


def load(folder: Path, *, keeps_float: bool = False) -> DecoderWeights:
    """Read in pieces of 3000 bytes: FP8 and dense weights in several."""
    config = load_model_config(folder)
    if keeps_float:
        assert config.quantization is not None
        config = replace(config, quantization=config.quantization.kept_float())
    return load_weights(Checkpoint(folder, piece_nbytes=3000), config, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_what_its_library_says(folders: dict[str, Path], name: str) -> None:
    stands_for = load_file(folders[name] / "dense" / "model.safetensors")
    for i, layer in enumerate(load(folders[name]).layers):
        for linear, parts in (
            (layer.attention.qkv_proj, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.attention.o_proj, ("self_attn.o_proj",)),
            (layer.mlp.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down_proj, ("mlp.down_proj",)),
        ):
            wanted = torch.cat([stands_for[f"model.layers.{i}.{part}.weight"] for part in parts])
            if parts[0] == "self_attn.q_proj":
                biases = torch.cat([stands_for[f"model.layers.{i}.{part}.bias"] for part in parts])
                assert linear.bias_N is not None and torch.equal(linear.bias_N, biases)
            if name.startswith("fp8"):
                assert isinstance(linear, DenseLinear) and torch.equal(linear.weight_NK, wanted.bfloat16())
                continue
            assert isinstance(linear, QuantizedLinear) and linear.bits == (8 if "8" in name else 4)
            assert torch.equal(linear.dequantized(), wanted.float())
            assert (linear.order_K is not None) == name.endswith("order")
    assert isinstance(load(folders[name]).lm_head, DenseLinear)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_in_pieces_is_the_layer(folders: dict[str, Path], name: str) -> None:
    quantization = load_model_config(folders[name]).quantization
    scheme = quantization.scheme_of("gate_proj") if quantization is not None else None
    assert scheme is not None
    layer = LinearSpec("model.layers.1.mlp.gate_proj", 128, 64, scheme)
    source, form = Checkpoint(folders[name]), READERS[scheme.layout]
    firsts, pieces = zip(*form.pieces(source, layer, torch.bfloat16, num_codes=70 * 64), strict=True)
    assert firsts == ((0, 96) if name in ("fp8-block", "fp8-transformers") else (0, 64))
    whole = form.read(source, layer, torch.bfloat16)
    x_TK = X[:, :64]
    assert torch.equal(torch.cat([piece.multiply(x_TK) for piece in pieces], 1), whole.multiply(x_TK))


def test_words_are_unpacked_in_pieces() -> None:
    """Two rows are more than a piece."""
    words = torch.randint(-(1 << 31), 1 << 31, (3, 20_000), generator=torch.Generator().manual_seed(1))
    codes = unpack(words.to(torch.int32), 4, 160_000 - 3)
    assert torch.equal(codes, torch.stack([words >> 4 * i & 15 for i in range(8)], 2).flatten(1)[:, :-3])


def test_codes_that_fill_no_whole_words() -> None:
    scheme = Scheme(layout=Layout.PACK_QUANTIZED, bits=4, group_size=None, is_symmetric=False)
    tensors = READERS[scheme.layout].tensors(LinearSpec("w", 12, 20, scheme))
    assert tensors["w.weight_packed"].shape == (12, 3) and tensors["w.weight_zero_point"].shape == (2, 1)


def test_an_lm_head_that_is_quantized_in_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    config, quantize = gptq(4, 32)
    dense = folders["gptq"].parent / "dense"
    folder = quantize_folder(dense, tmp_path / "model", (config | {"lm_head": True}, quantize), lm_head=True)
    stands_for, done = load_file(folder / "dense" / "model.safetensors")["lm_head.weight"], list[float]()
    with WeightReader(
        Checkpoint(folder),
        load_model_config(folder),
        dtype=torch.bfloat16,
        device=CPU,
        on_progress=done.append,
    ) as reader:
        whole = reader.lm_head(reader.embed())
        assert isinstance(whole, QuantizedLinear) and torch.equal(whole.dequantized(), stands_for)
        before = done[-1]
        ((first, piece),) = reader.lm_head_pieces()
        assert first == 0 and torch.equal(piece.multiply(X[:, :64]), whole.multiply(X[:, :64]))
        assert done[-1] > before


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_in_another_order(folders: dict[str, Path], name: str) -> None:
    linear = load(folders[name]).layers[0].mlp.gate_up_proj
    order_N = torch.randperm(linear.shape[0])
    x_TK = torch.randn(3, linear.shape[1]).bfloat16()
    assert torch.equal(linear.with_outputs(order_N).multiply(x_TK), linear.multiply(x_TK)[:, order_N])


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block", "fp8-transformers"])
def test_fp8_stays_what_it_is_where_blocks_divide_the_inputs(folders: dict[str, Path], name: str) -> None:
    config = load_model_config(folders[name])
    assert config.quantization is not None
    kept = replace(config, quantization=config.quantization.kept_float())
    weights = load(folders[name], keeps_float=True)
    assert weights_nbytes(kept, torch.bfloat16) < weights_nbytes(config, torch.bfloat16)
    stands_for = load_file(folders[name] / "dense" / "model.safetensors")
    for i, layer in enumerate(weights.layers):
        for part, linear in (
            ("self_attn.o_proj", layer.attention.o_proj),
            ("mlp.down_proj", layer.mlp.down_proj),
        ):
            wanted = stands_for[f"model.layers.{i}.{part}.weight"]
            if name == "fp8-block" and wanted.shape[1] % 48:
                assert isinstance(linear, DenseLinear)
                continue
            assert isinstance(linear, QuantizedLinear) and linear.is_float
            assert linear.is_weight_only == (name != "fp8-transformers")  # the others have weights alone
            torch.testing.assert_close(linear.dequantized(), wanted.float(), rtol=1e-6, atol=0)


def test_activations_of_fp8_are_quantized_where_the_file_says_so(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    asks = of_group(
        input_activations={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    )
    folder = changed(folders["fp8-tensor"], tmp_path / "asks", asks)
    for of, name in ((folder, "W8A8"), (folders["fp8-tensor"], "FP8")):
        quantization = load_model_config(of).quantization
        assert quantization is not None and quantization.weight_only() == quantization
        assert quantization.name == "FP8 compressed-tensors float-quantized"
        assert quantization.kept_float().name == f"{name} compressed-tensors float-quantized"
    x_TK = X[:, :64]
    rounded, exact = (
        load(of, keeps_float=True).layers[0].attention.o_proj.multiply(x_TK).float()
        for of in (folder, folders["fp8-tensor"])
    )
    assert 0.005 < (rounded - exact).std() / exact.std() < 0.1


def test_the_bytes_of_weights_are_those_of_their_codes(folders: dict[str, Path]) -> None:
    dense = load_model_config(folders["w8a8"] / "dense")
    table = 512 * 64
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128  # q, k and v; o; gate, up and down

    def nbytes(config: ModelConfig) -> int:
        return weights_nbytes(config, torch.bfloat16)

    assert nbytes(dense) == 2 * (2 * table + 3 * per_layer)
    fours = load_model_config(folders["w4a16-g32"])
    scales = 4 * per_layer // 32
    assert nbytes(fours) == 2 * 2 * table + 3 * (per_layer // 2 + scales)
    assert nbytes(load_model_config(folders["fp8-block"])) == nbytes(dense)
    tied = replace(dense, tie_word_embeddings=True, quantization=quantize_on_load("int8"))
    rows = 64 + 2 * 32 + 64 + 2 * 128 + 64
    assert nbytes(tied) == 3 * table + 4 * 512 + 3 * (per_layer + 4 * rows)


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy with another quantization_config."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    change(config["quantization_config"])
    (to / "config.json").write_text(json.dumps(config))
    return to


def of_group(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config_groups"]["group_0"].update(fields)


def of_weights(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], list[str]]] = [
    ("w8a8", lambda config: config.update(quant_method="fbgemm_fp8"), ["quant_method", "fbgemm_fp8"]),
    ("w8a8", lambda config: config.update(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
    (
        "w8a8",
        lambda config: config.update(sparsity_config={"format": "sparse-24"}),
        ["sparsity_config", "sparse-24"],
    ),
    ("w8a8", lambda config: config.update(transform_config={"config_groups": {}}), ["transform_config"]),
    ("w8a8", lambda config: config.pop("config_groups"), ["config_groups"]),
    ("w8a8", of_weights(type="float"), ["group_0.weights", "float"]),
    ("w8a8", of_weights(num_bits=6), ["group_0.weights", "6 bits"]),
    ("w8a8", of_weights(strategy="tensor"), ["group_0.weights.strategy", "tensor"]),
    ("w8a8", of_weights(strategy="group", group_size=32), ["group_0.weights.strategy", "group"]),
    ("w8a8", of_group(format="pack-quantized"), ["group_0.format", "pack-quantized"]),
    ("w8a8", of_group(output_activations={"num_bits": 8}), ["group_0.output_activations"]),
    ("w8a8", of_group(input_activations={"num_bits": 8, "dynamic": False}), ["group_0.input_activations"]),
    ("w4a16-g32", of_weights(strategy="group", group_size=-1), ["group_0.weights.strategy"]),
    ("fp8-channel", of_weights(num_bits=4), ["group_0.weights", "float of 4 bits"]),
    ("fp8-channel", of_weights(dynamic=True), ["group_0", "dynamic"]),
    ("fp8-channel", of_group(output_activations={"num_bits": 8}), ["group_0", "output_activations"]),
    ("fp8-channel", of_group(input_activations={"num_bits": 4}), ["group_0.input_activations", "int of 4"]),
    ("fp8-block", of_weights(block_structure="-48x48"), ["group_0.weights.strategy", "two sizes"]),
    ("fp8-block", of_weights(strategy="tensor_group"), ["group_0.weights.strategy", "tensor_group"]),
    ("fp8-block", of_weights(block_structure="9" * 5000), ["group_0.weights.strategy", "two sizes"]),
    ("w8a8", of_weights(dynamic=True), ["group_0.weights", "dynamic True"]),
    (
        "fp8-channel",
        of_group(format="int-quantized"),
        ["group_0.weights", "float of 8 bits", "int-quantized"],
    ),
    ("fp8-transformers", lambda config: config.update(weight_block_size=[48]), ["weight_block_size"]),
    (
        "fp8-transformers",
        lambda config: config.update(kv_cache_scheme="static"),
        ["kv_cache_scheme", "static"],
    ),
    ("w8a8", lambda config: config.update(ignore=["re:(lm_head"]), ["re:(lm_head"]),
    ("w8a8", lambda config: config.update(ignore=["re:a{99999999999}"]), ["re:a{99999999999}", "too large"]),
    ("awq", lambda config: config.update(version="gemv"), ["version", "gemv"]),
    ("awq", lambda config: config.update(bits=3), ["bits", "3"]),
    ("gptq", lambda config: config.update(bits=2), ["bits", "2"]),
    ("gptq", lambda config: config.update(checkpoint_format="marlin"), ["checkpoint_format", "marlin"]),
    ("gptq", lambda config: config.update(dynamic={r"+:.*\.18\..*": {"bits": 8}}), ["dynamic"]),
    ("gptq", lambda config: config.update(dynamic={"-:(gate": {}}), ["re:(gate"]),
    ("gptq", lambda config: config.update(group_size=-2), ["group_size"]),
]


AS_WRITTEN: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (
        "w8a8",
        lambda config: config.update(quantization_status="frozen", sparsity_config={}, transform_config={}),
    ),
    ("w8a8", lambda config: config.update(sparsity_config={"format": "dense", "global_sparsity": 1.0})),
    ("w4a16-g32", lambda config: config["config_groups"]["group_0"]["weights"].pop("strategy")),
    ("w4a16", of_weights(strategy=None, group_size=-1)),
    ("w4a16-g32", of_weights(actorder="weight")),
    ("w4a16-g32-order", of_weights(actorder="dynamic")),
    ("fp8-channel", lambda config: (config.update(format="naive-quantized"), of_group(format=None)(config))),
    ("fp8-block", of_weights(block_structure="48x48")),
    ("awq", lambda config: config.update(version="GEMM", modules_to_not_convert=None)),
    ("gptq", lambda config: config.update(lm_head=None, checkpoint_format=None, meta={"quantizer": ["a"]})),
    ("gptq-v2", lambda config: config.update(format=config.pop("checkpoint_format"))),
]


@pytest.mark.parametrize(("name", "change"), AS_WRITTEN)
def test_what_libraries_of_several_years_write_is_read(
    folders: dict[str, Path], tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = changed(folders[name], tmp_path / "changed", change)
    assert load_model_config(folder).quantization == load_model_config(folders[name]).quantization


def test_layers_that_gptq_leaves_out_are_not_quantized(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        folders["gptq"], tmp_path / "changed", lambda config: config.update(dynamic={r"-:.*\.gate$": {}})
    )
    quantization = load_model_config(folder).quantization
    assert quantization is not None and quantization.scheme_of("model.layers.0.mlp.gate") is None
    assert quantization.scheme_of("model.layers.0.mlp.gate_proj") is not None


@pytest.mark.parametrize(
    ("name", "change", "named"), REFUSED, ids=lambda value: "-".join(value) if isinstance(value, list) else ""
)
def test_a_scheme_that_is_not_read_is_refused_by_name(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, Any]], object],
    named: list[str],
) -> None:
    folder = changed(folders[name], tmp_path / "changed", change)
    (folder / "model.safetensors").unlink()  # before anything is read
    with pytest.raises(ModelError) as refused:
        load_model_config(folder)
    assert "quantization_config" in str(refused.value)
    assert all(part in str(refused.value) for part in named)


def test_fp8_with_a_scale_for_each_tensor_as_autofp8_writes_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def as_autofp8(*ignored: str) -> Callable[[dict[str, Any]], object]:
        fields = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ignored}
        return lambda config: (config.clear(), config.update(fields))

    folder = changed(folders["fp8-tensor"], tmp_path / "all", as_autofp8("lm_head"))
    quantization = load_model_config(folder).quantization
    assert quantization is not None
    assert (quantization.name, quantization.kept_float().name) == ("FP8 tensors", "W8A8 tensors")
    for ours, theirs in zip(load(folder).layers, load(folders["fp8-tensor"]).layers, strict=True):
        assert torch.equal(ours.mlp.down_proj.multiply(X), theirs.mlp.down_proj.multiply(X))
    some = load_model_config(
        changed(folders["fp8-tensor"], tmp_path / "some", as_autofp8("1.mlp"))
    ).quantization
    assert some is not None and some.scheme_of("model.layers.1.mlp.up_proj") is None


def test_groups_that_do_not_divide_the_inputs_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["awq"], tmp_path / "changed", lambda config: config.update(group_size=48))
    with pytest.raises(ModelError, match=r"q_proj: 64 inputs are no multiple of its group_size 48"):
        load(folder)


def test_a_scale_without_an_axis_and_a_shape_of_32_bits(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, part, other in (
        ("fp8-tensor", "weight_scale", lambda tensor: tensor[0]),
        ("w4a16", "weight_shape", lambda tensor: tensor.int()),
    ):
        folder = shutil.copytree(folders[name], tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        as_written = {each: other(value) if each.endswith(part) else value for each, value in tensors.items()}
        save_file(as_written, folder / "model.safetensors")
        for ours, theirs in zip(load(folder).layers, load(folders[name]).layers, strict=True):
            assert torch.equal(ours.mlp.down_proj.multiply(X), theirs.mlp.down_proj.multiply(X))


def with_last(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with another last element."""
    copy = tensor.clone()
    copy.view(-1)[-1] = value
    return copy


WRONG: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None]]] = [
    ("w8a8", "model.layers.1.mlp.up_proj.weight_scale", lambda tensor: None),
    ("w8a8", "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor.float()),
    ("w4a16-g32", "model.layers.0.self_attn.k_proj.weight_packed", lambda tensor: tensor[:, 1:].contiguous()),
    ("w4a16-g32", "model.layers.0.self_attn.k_proj.weight_shape", lambda tensor: tensor + 1),
    ("w4a16-g32-order", "model.layers.2.mlp.down_proj.weight_g_idx", lambda tensor: tensor * 0),
    ("awq", "model.layers.0.mlp.gate_proj.qzeros", lambda tensor: None),
    ("gptq", "model.layers.0.mlp.gate_proj.scales", lambda tensor: tensor.T.contiguous()),
    ("gptq-order", "model.layers.0.self_attn.q_proj.g_idx", lambda tensor: tensor.flip(0)),
    ("w8a8", "model.layers.1.mlp.down_proj.weight_scale", lambda tensor: with_last(tensor, torch.nan)),
    ("fp8-block", "model.layers.1.mlp.down_proj.weight_scale", lambda tensor: with_last(tensor, torch.inf)),
    ("fp8-channel", "model.layers.1.mlp.down_proj.weight_scale", lambda tensor: with_last(tensor, torch.inf)),
]


@pytest.mark.parametrize(
    ("name", "tensor", "change"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    tensor: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    folder = shutil.copytree(folders[name], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    other = change(tensors.pop(tensor))
    save_file(tensors if other is None else tensors | {tensor: other}, folder / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        load(folder, keeps_float=name == "fp8-channel")
    layer, words = tensor.rpartition(".")[0], str(refused.value)
    assert layer in words and (tensor in words or "g_idx" in words or "a scale is not finite" in words)


def test_layers_that_are_computed_as_one_are_quantized_alike(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    ignore = ["lm_head", "re:.*layers.1.self_attn.k_proj"]
    folder = changed(folders["w8a8"], tmp_path / "changed", lambda config: config.update(ignore=ignore))
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert "model.layers.1.self_attn.q_proj, model.layers.1.self_attn.k_proj" in str(refused.value)


def test_groups_of_layers_and_what_is_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    """One folder of two: attention in 8 bits, the MLP in 4, all of layer 2 as it was."""
    w8a8, w4a16 = folders["w8a8"], folders["w4a16-g32"]

    def mixed(config: dict[str, Any]) -> None:
        groups = json.loads((w4a16 / "config.json").read_text())["quantization_config"]["config_groups"]
        config["config_groups"]["group_1"] = groups["group_0"] | {"targets": [r"re:.*mlp\..*_proj$"]}
        config["ignore"] = ["lm_head", r"re:model\.layers\.2\..*"]

    folder = changed(w8a8, tmp_path / "changed", mixed)
    dense, eights, fours = (
        load_file(each / "model.safetensors") for each in (w8a8.parent / "dense", w8a8, w4a16)
    )
    of_layer_2 = {name: tensor for name, tensor in dense.items() if ".layers.2." in name}
    attention = {
        name: tensor for name, tensor in eights.items() if ".mlp." not in name and ".layers.2." not in name
    }
    mlp = {name: tensor for name, tensor in fours.items() if ".mlp." in name and ".layers.2." not in name}
    save_file(attention | mlp | of_layer_2, folder / "model.safetensors")
    layers = load(folder).layers
    for layer in layers[:2]:
        assert isinstance(layer.attention.qkv_proj, QuantizedLinear) and layer.attention.qkv_proj.bits == 8
        assert isinstance(layer.mlp.down_proj, QuantizedLinear) and layer.mlp.down_proj.bits == 4
    assert isinstance(layers[2].attention.qkv_proj, DenseLinear) and isinstance(
        layers[2].mlp.gate_up_proj, DenseLinear
    )


def test_the_config_has_an_older_name_and_is_missed(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["w4a16"], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config | {"compression_config": quantization}))
    assert load_model_config(folder).quantization == load_model_config(folders["w4a16"]).quantization
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"lack .*q_proj\.weight and 20 more; they have .*q_proj\.weight_packed"
    ):
        load(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_become_the_nearest_codes(bits: int) -> None:
    """What is largest in a group is exact, and all that is not its opposite is half a step off at most."""
    weight_NK = torch.randn(40, 96, generator=torch.Generator().manual_seed(bits))
    weight_NK[0], weight_NK[1, :32] = 0.0, 1e-40
    layer = quantize_weight(weight_NK, bits=bits, group_size=32)
    groups_NGK, quantized_NGK = in_groups(weight_NK, 32), in_groups(layer.dequantized(), 32)
    largest, step_NG = groups_NGK.abs().argmax(2, keepdim=True), layer.scales_NG.abs()
    torch.testing.assert_close(quantized_NGK.gather(2, largest), groups_NGK.gather(2, largest))
    off_NGK = (quantized_NGK - groups_NGK).abs() / step_NG[..., None]
    assert off_NGK.amax() <= 1.0 and (off_NGK > 0.5001).float().mean() < 0.02
    assert layer.codes_NK.min() == 0 and layer.codes_NK.max() == (1 << bits) - 1


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_weights_that_are_not_finite_are_not_quantized(tmp_path: Path, layer: str, value: float) -> None:
    path = make_model(tmp_path, "qwen3", num_hidden_layers=2) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{layer}.weight": with_last(tensors[f"{layer}.weight"], value)}, path)
    config = replace(load_model_config(tmp_path), quantization=quantize_on_load("int4"))
    with pytest.raises(ModelError, match=f"{layer}: a scale"):
        load_weights(Checkpoint(tmp_path), config, dtype=torch.bfloat16, device=CPU)


def test_names_of_layers_that_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    def is_quantized(name: str, layer: str, **change: Any) -> bool:
        to = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        quantization = load_model_config(
            changed(folders[name], to, lambda config: config.update(change))
        ).quantization
        return quantization is not None and quantization.scheme_of(layer) is not None

    assert is_quantized("gptq", "lm_head", lm_head=True) and not is_quantized("gptq", "lm_head")
    up_proj = "model.layers.1.mlp.up_proj"
    assert not is_quantized("awq", up_proj, modules_to_not_convert=["1.mlp"])
    assert is_quantized("awq", up_proj, modules_to_not_convert=["1.m.p"])
    assert not is_quantized("w8a8", up_proj, ignore=["re:.*mlp"])
    assert is_quantized("w8a8", up_proj, ignore=["re:mlp"])  # compressed-tensors takes re.match


def test_activations_stay_what_they_are_where_a_checkpoint_does_not_ask_for_codes(
    folders: dict[str, Path],
) -> None:
    def name_of(name: str) -> str:
        quantization = load_model_config(folders[name]).quantization
        assert quantization is not None
        return quantization.weight_only().name

    assert name_of("gptq") == "W4A16 gptq" and name_of("w8a16") == "W8A16 compressed-tensors pack-quantized"
    assert name_of("w8a8") == "W8A8 compressed-tensors int-quantized"
    assert name_of("fp8-tensor") == "FP8 compressed-tensors float-quantized"


def test_a_name_comes_before_a_regex_and_a_regex_before_all_layers() -> None:
    one, some, all_others = (
        Scheme(layout=Layout.ON_LOAD, bits=8, group_size=size, is_symmetric=True) for size in (32, 64, 128)
    )
    quantization = Quantization(
        schemes=((("Linear",), all_others), (("re:.*mlp",), some), (("mlp.up",), one))
    )
    assert [quantization.scheme_of(name) for name in ("mlp.up", "mlp.down", "o")] == [one, some, all_others]


def test_a_tied_lm_head_of_dummy_weights_is_dense() -> None:
    int8 = quantize_on_load("int8")
    assert of_dummy_weights(int8, is_tied=False).scheme_of("lm_head") is not None
    assert of_dummy_weights(int8, is_tied=True).scheme_of("lm_head") is None


@pytest.mark.parametrize(
    ("k", "weight_only", "group_size"),
    [(256, False, 128), (256, True, 256), (96, False, 32), (48, False, 48)],
)
def test_activations_have_a_scale_for_each_group_where_weights_have_one_for_all(
    k: int, weight_only: bool, group_size: int
) -> None:
    scheme = Scheme(
        layout=Layout.PACK_QUANTIZED, bits=8, group_size=None, is_symmetric=True, is_weight_only=weight_only
    )
    layer = LinearSpec("down_proj", 4, k, scheme).linear(
        torch.zeros(4, k, dtype=torch.uint8),
        torch.ones(4, 1),
        torch.full((4, 1), 3, dtype=torch.uint8),
        None,
    )
    assert layer.group_size == group_size and (layer.dequantized() == -3).all()


def test_zeros_of_gptq_wrap_around(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in AutoGPTQ: a file has one less, and 15 for 0."""
    folder = shutil.copytree(folders["gptq"], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.qzeros"].fill_(-1)
    save_file(tensors, folder / "model.safetensors")
    down_proj = load(folder).layers[0].mlp.down_proj
    assert isinstance(down_proj, QuantizedLinear) and down_proj.zeros_NG is not None
    assert not down_proj.zeros_NG.any()
