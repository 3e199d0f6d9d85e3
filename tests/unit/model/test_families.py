"""Every family against transformers, with every switch of its config drawn: logits in float32, in chunks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.models import families
from tests.modelzoo import make_model, random_prompt, reference_logits
from tests.unit.model.test_decoder import load, logits_in_chunks
from tests.unit.model.test_rope import KINDS, scalings

LENGTH = 96
Switches = Mapping[str, st.SearchStrategy[Any]]

SIZES: Switches = {
    "num_hidden_layers": st.integers(1, 3),
    "hidden_size": st.sampled_from([32, 64]),
    "intermediate_size": st.sampled_from([24, 64]),
    "num_attention_heads": st.just(4),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "vocab_size": st.just(300),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    "rope_theta": st.sampled_from([1e4, 1e6]),
    "max_position_embeddings": st.just(LENGTH),
}
HEAD_DIM: Switches = {"head_dim": st.sampled_from([16, 32])}
WINDOWS = [1, 17, LENGTH // 2, LENGTH - 1, LENGTH, 2 * LENGTH]
WINDOW: Switches = {"sliding_window": st.sampled_from([None, *WINDOWS])}
QWEN_WINDOW: Switches = {
    "use_sliding_window": st.booleans(),
    "sliding_window": st.sampled_from(WINDOWS),
    "max_window_layers": st.integers(0, 3),
}
FAMILIES: dict[str, Switches] = {
    "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans(), **HEAD_DIM},
    "mistral": WINDOW | HEAD_DIM,
    "qwen2": QWEN_WINDOW,
    "qwen3": {"attention_bias": st.booleans(), **QWEN_WINDOW, **HEAD_DIM},
    "phi3": WINDOW,
    "glm": {"attention_bias": st.booleans(), **HEAD_DIM},
    "glm4": {"attention_bias": st.booleans(), **HEAD_DIM},
    "gemma3": {
        "attention_bias": st.booleans(),
        "query_pre_attn_scalar": st.sampled_from([16, 24, 256]),
        "sliding_window": st.sampled_from(WINDOWS),
        "sliding_window_pattern": st.integers(1, 3),
        "rope_local_base_freq": st.sampled_from([1e4, 1e5]),
        **HEAD_DIM,
    },
}

ROPES = {"phi3": ("longrope",), "gemma3": ("linear", "dynamic", "llama3")}
"""The rope types of these families. Of a YaRN for each type of layer, transformers 5.24 does not read `truncate`."""


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Fields of config.json. The context of `dynamic` is as long as the prompt."""
    fields = draw(st.fixed_dictionaries({**SIZES, **FAMILIES[family]}))
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    rotary_dim = head_dim
    if family in ("phi3", "glm", "glm4"):
        rotary_dim = draw(st.sampled_from([head_dim, head_dim // 2, head_dim - 2]))
        fields["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = draw(st.one_of(st.none(), scalings(rotary_dim, ROPES.get(family, KINDS))))
    if scaling is not None:
        scaling.pop("original_max_position_embeddings", None)
        original = draw(st.sampled_from([16, LENGTH]))
        if scaling["rope_type"] == "dynamic":
            scaling["factor"] = 2.0
            fields["max_position_embeddings"] = LENGTH // 2
        elif family == "phi3":
            fields["original_max_position_embeddings"] = original
        elif scaling["rope_type"] != "linear":
            scaling["original_max_position_embeddings"] = original
    return fields | {"rope_scaling": scaling}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    @settings(max_examples=12)
    @given(configs(family), st.integers(1, LENGTH))
    def check(fields: dict[str, Any], chunk: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), family, **fields)
            ids = random_prompt(LENGTH, seed=7, vocab_size=300)
            chunks = [len(piece) for piece in torch.arange(LENGTH).split(chunk)]
            logits = logits_in_chunks(load(Path(folder)), ids, chunks)
            torch.testing.assert_close(logits, reference_logits(Path(folder), ids), atol=1e-3, rtol=0)

    check()


@pytest.mark.parametrize("architecture", families())
def test_what_a_file_leaves_out_is_as_transformers_has_it(architecture: str) -> None:
    """No tensor's shape shows a wrong one. A window of Qwen's that is not switched on is None there."""
    import transformers  # slow

    config = getattr(transformers, architecture).config_class().get_text_config()
    theirs = config.to_dict() | config.rope_parameters
    if "full_attention" in config.rope_parameters:
        full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
        theirs |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": sliding["rope_theta"]}
        theirs["sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
    fields = msgspec.structs.fields(families()[architecture].fields)
    ours = {field.name: field.default for field in fields if isinstance(field.default, int | float)}
    if not ours.get("use_sliding_window", True):
        ours["sliding_window"] = None
    assert "tie_word_embeddings" in ours
    assert ours == {name: theirs[name] for name in ours}
