"""The models of the two commands: known shapes with random weights by seed, and tiny ones for a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.models import SHAPES, Shape, write_configs
from tests.gpu.steps import Place
from tests.modelzoo import write_tokenizer

CONTEXT_LENGTH = 16_384


@dataclass(frozen=True, kw_only=True)
class Model:
    """A folder without weights, and the shape that it describes."""

    name: str
    shape: Shape
    folder: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a node that serves it."""
        return ("--model", str(self.folder), "--load-format", "dummy", "--dtype", "bfloat16")


GPU_SHAPES = {
    "8b": Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        tie_word_embeddings=False,
        vocab_size=128_256,
        context_length=CONTEXT_LENGTH,
    ),
    "0.6b": replace(SHAPES["qwen3-0.6b"], vocab_size=151_936, context_length=CONTEXT_LENGTH),
}


TINY = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 4096,
    "context_length": 1024,
}


def dummy_model(place: Place, name: str) -> Model:
    """Write the configuration of a model. A dry run has the same model with little of everything."""
    return _write(place.scratch / name, name, dry=place.is_dry)


def fleet_model(root: Path, *, dry: bool) -> Model:
    """The model of the tests of processes."""
    return _write(root / "model", "0.6b", dry=dry)


def _write(folder: Path, name: str, *, dry: bool) -> Model:
    shape = replace(GPU_SHAPES[name], **TINY) if dry else GPU_SHAPES[name]
    folder.mkdir()
    write_configs(folder, shape)
    write_tokenizer(folder)
    return Model(name=name, shape=shape, folder=folder)
