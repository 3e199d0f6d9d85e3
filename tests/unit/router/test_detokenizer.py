"""Streamed text is the text of all ids, for every kind of tokenizer, any ids and any way of cutting them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.detokenizer import (
    CONTEXT_TOKENS,
    ByteLevelDetokenizer,
    Vocabulary,
    WindowDetokenizer,
    make_detokenizer,
)
from tests.unit.router.sample_tokenizers import BYTE_FALLBACK, BYTE_LEVEL, KINDS, SPECIAL, TEXTS, sample

kinds = st.sampled_from(KINDS)
multilingual = st.lists(
    st.one_of(st.sampled_from(TEXTS), st.sampled_from(TEXTS).flatmap(st.sampled_from), st.text(max_size=8)),
    max_size=6,
).map("".join)


@st.composite
def ids_of(draw: st.DrawFn, kind: str, max_size: int = 40) -> list[int]:
    """Any tokens, and runs of real text among them; also ids that there is no token for."""
    num_ids = sample(kind).get_vocab_size()
    chunks = st.one_of(
        st.lists(st.integers(0, num_ids + 3), max_size=8),
        multilingual.map(lambda text: sample(kind).encode(text).ids),
        st.sampled_from(TEXTS).map(lambda text: sample(kind).encode(text).ids[1:-1]),
    )
    return [i for chunk in draw(st.lists(chunks, max_size=5)) for i in chunk][:max_size]


def streamed(kind: str, ids: Sequence[int], skip: bool, prompt_ids: Sequence[int] = ()) -> list[str]:
    vocabulary = Vocabulary(sample(kind))
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=skip, prompt_ids=prompt_ids)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def whole(kind: str, ids: Sequence[int], skip: bool, prompt_ids: Sequence[int] = ()) -> str:
    """The specification: the tokenizer's own decode of everything at once."""
    tokenizer = sample(kind)
    if kind in BYTE_LEVEL:
        return tokenizer.decode(list(ids), skip_special_tokens=skip)
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    before = tokenizer.decode(context, skip_special_tokens=skip)
    return tokenizer.decode([*context, *ids], skip_special_tokens=skip)[len(before) :]


@given(kinds, st.data(), st.booleans())
@settings(max_examples=300)
def test_any_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    """Where bytes may be no characters, and not all of a vocabulary is bytes, a run of them may be cut."""
    ids, prompt_ids = data.draw(ids_of(kind)), data.draw(ids_of(kind, max_size=8))
    text = "".join(streamed(kind, ids, skip, prompt_ids))
    if kind not in (*BYTE_FALLBACK, "nested_bytes"):
        assert text == whole(kind, ids, skip, prompt_ids)


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *BYTE_FALLBACK])
@given(text=multilingual)
@example(text="👩‍👩‍👧‍👦")
@settings(max_examples=60)
def test_text_in_any_script_comes_whole(kind: str, text: str) -> None:
    """And without the tokenizer's own idea of what broken bytes are: there are none."""
    ids = sample(kind).encode(text, add_special_tokens=False).ids
    expected = sample(kind).decode(ids, skip_special_tokens=False)
    shown = list(itertools.accumulate(streamed(kind, ids, False)))
    assert shown[-1] == expected
    assert all(expected.startswith(so_far) for so_far in shown), "never half a character"


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "gemma", "nested_bytes"])
def test_a_character_is_shown_with_its_last_byte(kind: str) -> None:
    ids = sample(kind).encode("a🦊日bᚠ", add_special_tokens=False).ids
    shown = streamed(kind, ids, True)
    assert "".join(shown).strip() == "a🦊日bᚠ"
    assert shown[-2] == "ᚠ", "also at the end of what has come: nothing waits for the next token"
    assert all("\ufffd" not in piece for piece in shown)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_shown_only_where_asked_for(kind: str) -> None:
    ids = [*sample(kind).encode("The quick", add_special_tokens=False).ids, sample(kind).token_to_id(SPECIAL)]
    assert "".join(streamed(kind, ids, False)).endswith(SPECIAL)
    assert SPECIAL not in "".join(streamed(kind, ids, True))


def test_hidden_tokens_do_not_part_the_bytes_of_a_character() -> None:
    for kind in ("gpt2", "llama2"):
        ids = sample(kind).encode("ᚠ", add_special_tokens=False).ids
        ids[-1:-1] = [sample(kind).token_to_id(SPECIAL)] * 20  # more than are held back
        assert "".join(streamed(kind, ids, True)).strip() == "ᚠ"


@pytest.mark.parametrize("kind", ["llama2", "unigram", "word_piece"])
def test_the_first_word_keeps_the_space_before_it(kind: str) -> None:
    tokenizer = sample(kind)
    ids = tokenizer.encode("The fox The fox", add_special_tokens=False).ids
    at = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "The fox")
    assert "".join(streamed(kind, ids[at:], True, ids[:at])) == " The fox"
    assert "".join(streamed(kind, ids[at:], True)) == "The fox"


def test_a_prompt_that_ends_in_half_a_character_leaves_the_output_alone() -> None:
    prompt_ids = sample("llama2").encode("ᚠ").ids[:-1]
    ids = sample("llama2").encode("ᚠ").ids[-3:]
    assert "".join(streamed("llama2", ids, True, prompt_ids)) == "ᚠ"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xe6\x97", "\ufffd\ufffd"),
        (b"ok\xff", "ok\ufffd"),
        (b"\xed\xa0\x80", "\ufffd" * 3),
        (b"\x80" * 40, "\ufffd" * 40),
    ],
)
def test_bytes_that_are_no_character_are_shown_as_such(data: bytes, text: str) -> None:
    ids = [sample("gemma").token_to_id(f"<0x{byte:02X}>") for byte in data]
    assert "".join(streamed("gemma", ids, True)) == text


class CountingVocabulary(Vocabulary):
    """Counts the tokens that the tokenizer decodes."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BYTE_LEVEL])
@pytest.mark.parametrize("what", ["words", "continuation bytes", "no such token", "nothing", "replacements"])
def test_a_token_costs_the_same_after_many(kind: str, what: str) -> None:
    tokenizer = sample(kind)
    repeated = {
        "words": tokenizer.encode("The quick 日 fox", add_special_tokens=False).ids,
        "continuation bytes": [tokenizer.token_to_id(t) or 3 for t in ("<0x80>", "Ģ")],
        "no such token": [tokenizer.get_vocab_size() + 10],
        "nothing": [tokenizer.token_to_id("▁") or 3],
        "replacements": tokenizer.encode("\ufffd", add_special_tokens=False).ids,
    }[what]
    vocabulary = CountingVocabulary(tokenizer)
    detokenizer = make_detokenizer(vocabulary, skip_special_tokens=True)
    ids = (repeated * 600)[:600]
    costs = []
    for token_id in ids:
        before = vocabulary.num_decoded
        detokenizer.feed(token_id)
        costs.append(vocabulary.num_decoded - before)
    assert max(costs) <= 80
    assert sum(costs[-300:]) <= 300 * 40


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    for kind in KINDS:
        assert "".join(streamed(kind, [10_000, 10_001], True)) == ""


def test_the_right_kind_is_chosen() -> None:
    expected = {
        "gpt2": ByteLevelDetokenizer,
        "llama2": WindowDetokenizer,
        "unigram": WindowDetokenizer,
        "nested_bytes": WindowDetokenizer,
    }
    for kind, detokenizer in expected.items():
        made = make_detokenizer(Vocabulary(sample(kind)), skip_special_tokens=True)
        assert isinstance(made, detokenizer)
