"""The zoo itself: golden tests elsewhere are only as sharp as its outputs are diverse."""

from __future__ import annotations

import json

import jinja2
import pytest
from tokenizers import Tokenizer

from tests.modelzoo import (
    ARCHITECTURES,
    EOS_TOKEN,
    EOS_TOKEN_ID,
    IM_END_ID,
    is_decided,
    random_prompt,
    reference_greedy,
)
from tests.unit.model.conftest import ModelFolder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_outputs_are_diverse(model_folder: ModelFolder, architecture: str, tied: bool) -> None:
    folder = model_folder(architecture, tie_word_embeddings=tied)
    for seed, length in enumerate((5, 12, 40)):
        assert len(set(reference_greedy(folder, random_prompt(length, seed=seed), 48))) >= 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_depend_on_the_first_token(model_folder: ModelFolder, architecture: str) -> None:
    folder, prompt = model_folder(architecture), random_prompt(40, seed=7)
    outputs = reference_greedy(folder, prompt, 48)
    others = reference_greedy(folder, [prompt[0] ^ 1, *prompt[1:]], 48)
    assert sum(a == b for a, b in zip(outputs, others, strict=True)) < 12


def test_eos_ends_the_reference(model_folder: ModelFolder) -> None:
    folder, prompt = model_folder("llama"), random_prompt(9)
    outputs = reference_greedy(folder, prompt, 16)
    end = outputs.index(outputs[5])
    assert reference_greedy(folder, prompt, 16, eos_ids=[outputs[5]]) == outputs[: end + 1]


def test_a_tie_is_seen(model_folder: ModelFolder) -> None:
    """After the prompt of seed 1211, the best two of the eighth token are 5e-6 apart."""
    folder = model_folder("llama", max_position_embeddings=2048)
    for seed, decided in ((1210, True), (1211, False)):
        prompt = random_prompt(300, seed=seed)
        assert is_decided(folder, prompt, reference_greedy(folder, prompt, 24)) == decided


def test_the_tokenizer_round_trips(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "A decode node, the kettle & 私 🎼\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert 260 < tokenizer.get_vocab_size() <= 512
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS_TOKEN_ID


def test_the_chat_template_renders(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    text = jinja2.Template(template).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert ids.count(IM_END_ID) == 1
