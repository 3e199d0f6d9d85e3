"""The decoder against transformers, in float32, on every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.modelzoo import ARCHITECTURES, random_prompt, reference_logits
from tests.unit.model.conftest import ModelFolder
from tests.unit.model.dense_ops import DenseOps

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "factor": 8.0,
}
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(Checkpoint(folder), load_model_config(folder), dtype=dtype, device=CPU)


@torch.inference_mode()
def logits_in_chunks(decoder: Decoder, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of every position, computed over successive chunks of these sizes."""
    assert sum(chunks) == len(ids)
    ops = DenseOps(decoder.config.num_layers)
    ids_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
    return torch.cat(
        [
            decoder.logits(decoder.forward(chunk_ids, chunk_positions, ops), ops)
            for chunk_ids, chunk_positions in zip(
                torch.split(ids_T, chunks), torch.split(positions_T, chunks), strict=True
            )
        ]
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_equals_transformers(model_folder: ModelFolder, architecture: str, tied: bool) -> None:
    folder = model_folder(architecture, tie_word_embeddings=tied)
    ids = random_prompt(45, seed=1)
    logits = logits_in_chunks(load(folder), ids, [45])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunked_prefill_and_decode_equal_transformers(model_folder: ModelFolder, architecture: str) -> None:
    folder = model_folder(architecture)
    ids = random_prompt(30, seed=2)
    logits = logits_in_chunks(load(folder), ids, [7, 11, 1, 5] + [1] * 6)
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


def test_embeddings_are_scaled_by_a_number_of_their_type(model_folder: ModelFolder) -> None:
    folder = model_folder("gemma3", hidden_size=48)
    assert load(folder).embed_scale == pytest.approx(48**0.5, rel=1e-7)
    assert load(folder, torch.bfloat16).embed_scale == 6.9375


def test_the_text_of_a_model_with_images_equals_transformers(model_folder: ModelFolder) -> None:
    folder = model_folder("gemma3_images", tie_word_embeddings=True)
    ids = random_prompt(30, seed=2)
    logits = logits_in_chunks(load(folder), ids, [19, 11])
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "rope", "atol"),
    [
        ("llama3", {}, 1e-4),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e-4),
        ("qwen2", {"rope_scaling": {"rope_type": "default"}}, 1e-4),
        ("qwen2", {"rope_scaling": YARN}, 1e-4),
        ("qwen3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}}, 2e-4),
        # transformers computes the larger theta in float32
        ("llama", {"rope_scaling": DYNAMIC, "max_position_embeddings": 100}, 1e-3),
        ("llama", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}}, 1e-4),
        ("llama", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 512}}, 1e-4),
        ("phi3", {"original_max_position_embeddings": 64}, 1e-4),
        ("phi3", {"rope_scaling": None, "partial_rotary_factor": 0.5}, 1e-4),
    ],
    ids=[
        "llama3",
        "linear",
        "default",
        "yarn",
        "yarn-mscale",
        "dynamic",
        "long",
        "short",
        "phi3",
        "phi3-default",
    ],
)
def test_rope_scaling_equals_transformers_far_from_the_start(
    model_folder: ModelFolder, architecture: str, rope: dict[str, object], atol: float
) -> None:
    """A prompt as long as the context of `dynamic`, in chunks: here frequencies do not follow the length so far."""
    folder = model_folder(architecture, **rope)
    ids = random_prompt(400, seed=3)
    logits = logits_in_chunks(load(folder), ids, [100] * 4)
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})],
    ids=["llama", "qwen3"],
)
def test_optional_biases_equal_transformers(
    model_folder: ModelFolder, architecture: str, biases: dict[str, bool]
) -> None:
    folder = model_folder(architecture, **biases)
    ids = random_prompt(20, seed=4)
    logits = logits_in_chunks(load(folder), ids, [20])
    torch.testing.assert_close(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_loads_and_stays_near_float32(model_folder: ModelFolder, architecture: str) -> None:
    folder = model_folder(architecture, dtype="bfloat16")
    config = load_model_config(folder)
    assert config.dtype == "bfloat16"
    decoder, ids = load(folder, torch.bfloat16), random_prompt(20, seed=6)
    assert decoder.weights.embed_VD.dtype == torch.bfloat16
    logits, reference = logits_in_chunks(decoder, ids, [20]), reference_logits(folder, ids)
    assert logits.dtype == torch.float32
    # Of the median token, since others may have chosen another expert of nearly the same score.
    error = ((logits - reference).norm(dim=1) / reference.norm(dim=1)).median()
    assert error < 0.1
