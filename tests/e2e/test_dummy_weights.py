"""--load-format dummy and --skip-tokenizer-init: a fleet of real processes from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import Fleet

pytestmark = pytest.mark.processes

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PROMPT = [(31 * i) % 2000 for i in range(50)]


def test_a_split_fleet_of_random_weights_moves_pages_and_answers_in_token_ids(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ("--load-format", "dummy", "--max-total-tokens", "4096")
    with Fleet(tmp_path, model, flags=flags, router_flags=("--skip-tokenizer-init",)) as fleet:
        router = fleet.router
        assert '-d \'{"input_ids": [1, 2, 3]' in router.log, "the example is one that this router answers"
        split = router.generate(PROMPT, 20, return_timeline=True)
        assert len(set(split.tokens())) > 10, "logits are sane"
        assert split.last["meta_info"]["kv_pages_transferred"] > 0, "fingerprints and numerics agree"
        refused = router.generate("a text", 5).finish()
        assert refused.error is not None and "--skip-tokenizer-init" in refused.error
        assert router.generate(PROMPT, 20).tokens() == split.tokens()
        fleet.stop()
