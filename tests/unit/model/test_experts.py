"""Mixtures of experts against transformers, with the switches of their configs drawn, and what is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.model.config import load_model_config
from shared.model.layer_records import ExpertsMlp
from tests.modelzoo import MIXTURES, make_model, random_prompt, reference_logits
from tests.unit.model.test_decoder import load, logits_in_chunks


@st.composite
def switches(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 20))
    chosen: dict[str, Any] = {
        "num_local_experts" if architecture == "mixtral" else "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, min(num_experts, 6))),
        "num_hidden_layers": 4,
        "intermediate_size": draw(st.sampled_from([40, 96])),
        "num_key_value_heads": draw(st.sampled_from([1, 4])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if architecture != "mixtral":
        chosen["norm_topk_prob"], chosen["attention_bias"] = draw(st.booleans()), draw(st.booleans())
    if architecture == "qwen3moe":
        chosen["decoder_sparse_step"] = draw(st.sampled_from([1, 2, 3]))
        chosen["mlp_only_layers"] = draw(st.lists(st.integers(0, 3), max_size=3, unique=True))
    return chosen


@pytest.mark.parametrize("architecture", MIXTURES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_logits_equal_those_of_transformers(architecture: str, data: st.DataObject) -> None:
    changes = data.draw(switches(architecture))
    with tempfile.TemporaryDirectory() as name:
        folder, ids = make_model(Path(name), architecture, **changes), random_prompt(30, seed=1)
        config = load_model_config(folder)
        sparse = [isinstance(layer.mlp, ExpertsMlp) for layer in config.layers]
        step, dense = changes.get("decoder_sparse_step", 1), changes.get("mlp_only_layers", [])
        assert sparse == [(i + 1) % step == 0 and i not in dense for i in range(4)]
        logits = logits_in_chunks(load(folder), ids, [7, 16, 1, 1, 5])
        torch.testing.assert_close(logits, reference_logits(folder, ids), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("qwen3moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts"),
        ("qwen3moe", {"num_local_experts": None}, "num_experts: is missing"),
        ("qwen3moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, architecture: str, change: dict[str, Any], named: str
) -> None:
    path = make_model(tmp_path, architecture) / "config.json"
    assert load_model_config(tmp_path).layers[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=named):
        load_model_config(tmp_path)
