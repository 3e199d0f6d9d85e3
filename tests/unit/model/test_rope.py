"""Frequencies and amplitudes of every rope type against transformers, with every parameter drawn."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.model.config import ModelConfig, load_model_config
from shared.model.rotary import rotary_waves
from tests.unit.model.test_config import LLAMA

CPU = torch.device("cpu")
HEAD_DIM = 32
KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
LENGTHS = st.integers(2, 4096)


def scalings(rotary_dim: int, kinds: Sequence[str] = KINDS) -> st.SearchStrategy[dict[str, Any]]:
    """What config.json says of one of these rope types."""
    num_pairs = rotary_dim // 2
    factor, factors = (
        st.floats(1.0, 64.0),
        st.lists(st.floats(1.0, 64.0), min_size=num_pairs, max_size=num_pairs),
    )
    low, original = st.floats(0.5, 2.0), {"original_max_position_embeddings": LENGTHS}
    needed: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "llama3": {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": st.floats(3.0, 8.0),
            **original,
        },
        "yarn": {"factor": factor, **original},
        "longrope": {"short_factor": factors, "long_factor": factors, **original},
    }
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "yarn": {
            "attention_factor": low,
            "mscale": low,
            "mscale_all_dim": low,
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
        "longrope": {"factor": factor, "attention_factor": low},
    }
    return st.one_of(
        st.fixed_dictionaries({"rope_type": st.just(kind), **needed[kind]}, optional=optional.get(kind))
        for kind in kinds
    )


def load(rope: dict[str, Any], most: int = 512) -> ModelConfig:
    fields = LLAMA | {"head_dim": HEAD_DIM, "max_position_embeddings": most, "rope_parameters": rope}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return load_model_config(Path(folder))


@given(
    st.data(), st.sampled_from(range(4, HEAD_DIM + 1, 2)), st.floats(100.0, 1e7), LENGTHS, st.floats(0.0, 1.0)
)
def test_waves_are_those_of_transformers(
    data: st.DataObject, rotary_dim: int, theta: float, most: int, part: float
) -> None:
    """Of a context of any length that the model may have, with any part of a head rotated."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = data.draw(scalings(rotary_dim))
    rope = scaling | {"rope_theta": theta, "partial_rotary_factor": rotary_dim / HEAD_DIM}
    ours = load(rope, most)
    length = max(math.ceil(part * ours.max_position_embeddings), 1)
    theirs = transformers.LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=most, rope_parameters=rope)
    frequencies_R, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, seq_len=length)
    waves_2R = rotary_waves(ours.made_for(length).ropes[0], HEAD_DIM, CPU)
    num_pairs = rotary_dim // 2
    torch.testing.assert_close(waves_2R[0, :num_pairs], frequencies_R, rtol=1e-5, atol=1e-12)
    assert waves_2R[1, :num_pairs].tolist() == pytest.approx([amplitude] * num_pairs)
    assert waves_2R[:, num_pairs:].tolist() == [[each] * (16 - num_pairs) for each in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("rope", "most", "context_length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 32_768, 131_072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 40_960, 131_072),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 40_960, 40_960),
        ({"rope_type": "dynamic", "factor": 2.5}, 4096, 10_240),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 4096),
    ],
    ids=["yarn", "yarn-some-more", "yarn-less", "dynamic", "linear"],
)
def test_the_context_that_scaling_makes(rope: dict[str, Any], most: int, context_length: int) -> None:
    assert load(rope, most).max_position_embeddings == context_length


def test_what_the_context_length_changes_has_a_name() -> None:
    """Nodes compare the names, so no node goes on with keys that it would not compute."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope = load({"rope_type": "longrope", "original_max_position_embeddings": 64} | factors, 512)
    names = [longrope.made_for(length).context_name for length in (64, 65, 512)]
    assert names == ["/rope-short", "/rope-long", "/rope-long"]
    dynamic = load({"rope_type": "dynamic", "factor": 4.0}, 64)
    assert [each.context_name for each in (dynamic, dynamic.made_for(100))] == [
        "/rope-of-256",
        "/rope-of-100",
    ]
    assert load({"rope_type": "linear", "factor": 4.0}, 64).made_for(32).context_name == ""
