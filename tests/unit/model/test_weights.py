from __future__ import annotations

import json
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelError
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.linear import DenseLinear, Linear
from shared.model.weights import DecoderWeights, WeightReader, load_weights
from tests.unit.model.conftest import ModelFolder

SHARDED = {"max_shard_size": "100KB"}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(
        Checkpoint(folder), load_model_config(folder), dtype=dtype, device=torch.device("cpu")
    )


@pytest.fixture
def copy_of(tmp_path: Path) -> ModelFolder:
    """A copy of a model folder, to be damaged."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the single weight file; None removes one. Underscores `__` stand for dots."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in named}
    save_file(kept | {name: tensor for name, tensor in named.items() if tensor is not None}, path)


def test_projections_are_fused_in_order(model_folder: ModelFolder) -> None:
    folder = model_folder("qwen2")
    saved, layer = load_file(folder / "model.safetensors"), load(folder).layers[1]
    qkv = [saved[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    bias = [saved[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    gate_up = [saved[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.attention.qkv_proj.weight_NK, torch.cat(qkv))
    assert torch.equal(layer.attention.qkv_proj.bias_N, torch.cat(bias))
    assert torch.equal(layer.mlp.gate_up_proj.weight_NK, torch.cat(gate_up))


def test_sharded_equals_single(model_folder: ModelFolder) -> None:
    single, sharded = model_folder("llama"), model_folder("llama", **SHARDED)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    a, b = load(single), load(sharded)
    assert torch.equal(a.lm_head.weight_NK, b.lm_head.weight_NK)
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        assert torch.equal(ours.attention.qkv_proj.weight_NK, theirs.attention.qkv_proj.weight_NK)
        assert torch.equal(ours.mlp.down_proj.weight_NK, theirs.mlp.down_proj.weight_NK)


def test_tied_embeddings_are_one_tensor(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama", tie_word_embeddings=True))
    edit(folder, lm_head__weight=torch.zeros(512, 64))  # some checkpoints hold it all the same
    weights = load(folder)
    assert weights.lm_head.weight_NK is weights.embed_VD


def test_a_wider_checkpoint_is_converted(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    weights = load(folder, torch.bfloat16)
    saved = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights.embed_VD, saved.to(torch.bfloat16))


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
def test_progress_rises_to_one(model_folder: ModelFolder, options: dict[str, str]) -> None:
    folder, seen = model_folder("qwen3", **options), list[float]()
    load_weights(
        Checkpoint(folder),
        load_model_config(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        on_progress=seen.append,
    )
    assert seen == sorted(seen)
    assert len(seen) > 30
    assert seen[-1] == 1.0


def test_linear_layers_come_one_at_a_time_and_are_the_callers(model_folder: ModelFolder) -> None:
    """A caller that repacks the weights holds one linear layer of them."""
    folder, options = model_folder("qwen3"), {"dtype": torch.float32, "device": torch.device("cpu")}
    whole, seen = load(folder), list[weakref.ref[torch.Tensor]]()

    def keep(linear: Linear, is_gate_up: bool) -> torch.Tensor:
        assert isinstance(linear, DenseLinear) and all(weight() is None for weight in seen)
        seen.append(weakref.ref(linear.weight_NK))
        return linear.weight_NK.sum() + is_gate_up

    with WeightReader(Checkpoint(folder), load_model_config(folder), **options) as reader:
        for i, layer in enumerate(reader.layers(keep)):
            assert torch.equal(layer.attention.qkv_proj, whole.layers[i].attention.qkv_proj.weight_NK.sum())
            assert torch.equal(layer.mlp.gate_up_proj, whole.layers[i].mlp.gate_up_proj.weight_NK.sum() + 1)
    assert len(seen) == 3 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_comes_in_pieces(model_folder: ModelFolder, tied: bool) -> None:
    """As large as is asked for, in order, of the type that is asked for; nothing is left out."""
    folder, seen = model_folder("llama", tie_word_embeddings=tied), list[float]()
    config, cpu = load_model_config(folder), torch.device("cpu")
    source = Checkpoint(folder, piece_nbytes=100 * 64 * 4 + 1)
    with WeightReader(source, config, dtype=torch.bfloat16, device=cpu, on_progress=seen.append) as reader:
        reader.embed()
        assert len(list(reader.layers(lambda linear, _: linear))) == 3
        reader.norm()
        pieces = list(reader.lm_head_pieces())
    assert [first for first, _ in pieces] == [0, 100, 200, 300, 400, 500]
    assert torch.equal(
        torch.cat([rows.weight_NK for _, rows in pieces]), load(folder, torch.bfloat16).lm_head.weight_NK
    )
    assert seen[-1] == 1.0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel says what is resident")
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
def test_nothing_of_the_files_stays_resident(
    model_folder: ModelFolder, copy_of: ModelFolder, options: dict[str, str]
) -> None:
    """The embedding table stays mapped, and takes memory only for rows that are used."""
    folder = copy_of(model_folder("llama", **options))  # which nobody else has mapped
    weights = load(folder)
    assert resident_kb(folder) == 0
    row = weights.embed_VD[511].clone()
    assert 0 < resident_kb(folder) < 512
    named = load(folder, torch.float64).embed_VD
    assert torch.equal(row, named[511].float())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel says what is resident")
def test_pieces_of_a_tensor_do_not_stay_resident(tmp_path: Path) -> None:
    """The kernel may map some MiB around what is read."""
    save_file({"rows": torch.ones(4096, 1024)}, tmp_path / "model.safetensors")
    pieces = Checkpoint(tmp_path, piece_nbytes=1 << 20).pieces("rows")
    seen = [(int(rows.sum()), resident_kb(tmp_path)) for _, rows in pieces]
    assert len(seen) == 16 and all(total == 1 << 18 and kb < 8 * 1024 for total, kb in seen)


def resident_kb(folder: Path) -> int:
    """How much of the folder's files is in this process's memory."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [mapping for mapping in mappings if str(folder) in mapping.split("\n", 1)[0]]
    assert ours, "the embedding table is mapped"
    return sum(int(re.search(r"^Rss: +(\d+) kB", mapping, flags=re.M)[1]) for mapping in ours)


def test_unknown_tensors_are_ignored(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama"))
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(folder)


def test_a_missing_tensor_is_named(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama"))
    edit(folder, model__layers__2__mlp__up_proj__weight=None, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight and 1 more"):
        load(folder)


def test_a_wrong_shape_is_named(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama"))
    edit(folder, model__layers__1__self_attn__k_proj__weight=torch.zeros(64, 64))
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.weight .*\(64, 64\).*\(32, 64\)"):
        load(folder)


def test_a_quantized_tensor_is_named(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama"))
    edit(folder, model__layers__0__mlp__down_proj__weight=torch.zeros(64, 128, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight .*I8"):
        load(folder)


def test_no_weights_at_all(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)


def test_a_missing_shard_is_named(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama", **SHARDED))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}.*missing"):
        load(folder)


def test_a_tensor_that_its_shard_lacks_is_named(model_folder: ModelFolder, copy_of: ModelFolder) -> None:
    folder = copy_of(model_folder("llama", **SHARDED))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    files["model.norm.weight"] = next(file for file in files.values() if file != files["model.norm.weight"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{files['model.norm.weight']}.*model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1], ids=["empty", "in-length", "in-header", "one-byte-short"])
def test_a_truncated_file_is_named(model_folder: ModelFolder, copy_of: ModelFolder, kept: int) -> None:
    folder = copy_of(model_folder("llama"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "malformed|truncated"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"\.\./x"),
    ],
    ids=["cut", "no-map", "outside"],
)
def test_a_bad_index_is_named(
    model_folder: ModelFolder, copy_of: ModelFolder, content: str, named: str
) -> None:
    folder = copy_of(model_folder("llama", **SHARDED))
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=rf"index\.json.*({named})"):
        load(folder)
