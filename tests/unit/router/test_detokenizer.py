"""Streamed text equals the text of all ids decoded at once, for any ids and any way of cutting them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.detokenizer import ByteLevelDetokenizer, Vocabulary, WindowDetokenizer
from tests.unit.router.fakes import EOS, STORY, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL.add_tokens(["<|tool call|>", "naïve☃"])


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: words with ▁, and a token for each byte of what is not in the vocabulary."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁The", "▁quick", "▁fox", "s", ",", ".", "▁", "ü", "日", "▁größ", "er"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], skip_special_tokens: bool) -> str:
    detokenizer = Vocabulary(tokenizer).detokenizer(skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.feed, pieces)) + detokenizer.flush()


def pieces_of(num_ids: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, num_ids - 1), max_size=6), max_size=20)


@given(pieces_of(BYTE_LEVEL.get_vocab_size()), st.booleans())
def test_byte_level_random_ids(pieces: list[list[int]], skip: bool) -> None:
    whole = BYTE_LEVEL.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    assert streamed(BYTE_LEVEL, pieces, skip) == whole


@given(pieces_of(SENTENCEPIECE.get_vocab_size()), st.booleans())
@settings(max_examples=300)
def test_sentencepiece_random_ids(pieces: list[list[int]], skip: bool) -> None:
    whole = SENTENCEPIECE.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    assert streamed(SENTENCEPIECE, pieces, skip) == whole


@given(st.text(max_size=60))
def test_byte_level_any_language(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    assert streamed(BYTE_LEVEL, [[i] for i in ids], False) == text


def test_half_a_character_is_held_back() -> None:
    ids = BYTE_LEVEL.encode("a🦊b").ids
    detokenizer = Vocabulary(BYTE_LEVEL).detokenizer(skip_special_tokens=True)
    shown = [detokenizer.feed([i]) for i in ids]
    assert "".join(shown) == "a🦊b"
    assert all("\ufffd" not in piece for piece in shown)
    assert shown.count("") == len(ids) - 3


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    ids = [*BYTE_LEVEL.encode(STORY).ids[:5], BYTE_LEVEL.token_to_id(EOS)]
    assert streamed(BYTE_LEVEL, [ids], skip).endswith(EOS) is not skip


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    assert streamed(BYTE_LEVEL, [[10_000]], True) == ""


def test_the_right_kind_is_chosen() -> None:
    assert isinstance(Vocabulary(BYTE_LEVEL).detokenizer(skip_special_tokens=True), ByteLevelDetokenizer)
    assert isinstance(Vocabulary(SENTENCEPIECE).detokenizer(skip_special_tokens=True), WindowDetokenizer)
