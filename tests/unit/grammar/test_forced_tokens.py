"""What XGrammar forces, spelled by real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.grammar.state import GrammarState
from shared.grammar.xgrammar_backend import (
    MAX_FORCED_BYTES,
    XGrammarBackend,
    XGrammarMatcher,
    continuation_encoder,
    tokenizer_info,
)
from shared.model.config import load_model_config
from shared.model.files import resolve_model
from shared.protocol.sampling_params import Grammar

KEYS = ("customer_identification_number", "preferred_delivery_address")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {KEYS[0]: {"type": "integer"}, KEYS[1]: {"type": "string"}},
            "required": KEYS,
        }
    ),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("builtin") / "tokenizer.json"))


@pytest.fixture(scope="module")
def state_of(tokenizer: Tokenizer) -> Callable[[Grammar, str], GrammarState]:
    folder = resolve_model("builtin")
    model = load_model_config(folder)
    backend = XGrammarBackend.load(folder, model.vocab_size, model.eos_token_ids)

    def after(grammar: Grammar, text: str) -> GrammarState:
        state = GrammarState(backend.compile(grammar), jump_forward=True)
        assert state.follow(tokenizer.encode(text).ids, 0)
        return state

    return after


@pytest.mark.parametrize(
    ("grammar", "before", "text"),
    [
        (SCHEMA, '{"', KEYS[0]),
        (SCHEMA, '{"cust', "omer_identification_number"),
        (SCHEMA, '{"customer_identification_number": 12, "', KEYS[1]),
        (SCHEMA, "{", ""),  # white space may follow
        (SCHEMA, '{"customer_identification_number": 12', ""),
        (SCHEMA, '{"customer_identification_number": 12, "preferred_delivery_address": "a', ""),
        (Grammar("regex", "The answer is (yes|no), I think"), "The answer is y", "es, I thin"),
        (Grammar("regex", "The answer is (yes|no), I think"), "The answer is ", ""),
        (Grammar("regex", "x größe, größe!"), "x", " größe, größe"),
    ],
    ids=str,
)
def test_all_but_the_last_token_of_what_is_forced(
    state_of: Callable[[Grammar, str], GrammarState],
    tokenizer: Tokenizer,
    grammar: Grammar,
    before: str,
    text: str,
) -> None:
    state = state_of(grammar, before)
    forced = state.forced_tokens()
    assert tokenizer.decode(forced) == text
    assert forced == state.forced_tokens(), "asking changes nothing"
    assert forced == tokenizer.encode(text).ids[: len(forced)]
    assert all(map(state.accept, forced))


def test_nothing_is_forced_within_a_character_or_after_the_end(
    state_of: Callable[[Grammar, str], GrammarState], tokenizer: Tokenizer
) -> None:
    state = state_of(Grammar("regex", "[a-c]éxxxxyyyyzzzz"), "a")
    assert len(state.forced_tokens()) > 3
    assert state.accept(tokenizer.token_to_id("Ã"))  # the first of two bytes
    assert state.forced_tokens() == []
    ended = state_of(Grammar("regex", "a+"), "a")
    assert ended.accept(tokenizer.token_to_id("<|endoftext|>"))
    assert ended.is_terminated and ended.forced_tokens() == []


def test_text_that_looks_like_a_special_token_is_not_one(
    state_of: Callable[[Grammar, str], GrammarState], tokenizer: Tokenizer
) -> None:
    """The grammar refuses the token, so a jump would end before it: see `jump_forward`."""
    special = next(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
    state = state_of(Grammar("ebnf", f"root ::= {json.dumps('x and ' + special + ' and more')}"), "x")
    accepted = [token for token in state.forced_tokens() if state.accept(token)]
    assert tokenizer.token_to_id(special) not in accepted


def sentencepiece_like() -> Tokenizer:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581", "de", "ver"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("d", "e")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_tokenizers_that_put_a_space_before_a_text() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.encode("de").tokens == ["\u2581", "de"]
    encode = continuation_encoder(tokenizer)
    assert [tokenizer.id_to_token(i) for i in encode("de ab")] == ["de", "\u2581", "a", "b"]
    backend = XGrammarBackend(tokenizer_info(tokenizer, tokenizer.get_vocab_size(), (1,)), encode)
    state = GrammarState(backend.compile(Grammar("regex", "[xy]deliver")), jump_forward=True)
    assert state.accept(tokenizer.token_to_id("x"))
    forced = state.forced_tokens()
    assert [tokenizer.id_to_token(i) for i in forced] == ["de", "l", "i", "v", "e"]
    assert all(map(state.accept, forced))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("ebnf", 'root ::= "ab" root'),
        Grammar("regex", "(ab){70000}"),
        Grammar(
            "ebnf",
            "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "ab"',
        ),
    ],
    ids=["endless", "repeated", "doubled 40 times"],
)
def test_a_text_without_an_end_is_forced_in_parts(
    tokenizer: Tokenizer, state_of: Callable[[Grammar, str], GrammarState], grammar: Grammar
) -> None:
    state = state_of(grammar, "a")
    for _ in range(3):
        forced = state.forced_tokens()
        text = tokenizer.decode(forced)
        assert (
            text == ("ba" * MAX_FORCED_BYTES)[: len(text)] or text == ("ab" * MAX_FORCED_BYTES)[: len(text)]
        )
        assert MAX_FORCED_BYTES // 2 < len(text) <= MAX_FORCED_BYTES
        assert all(state.accept(token) for token in forced)


def test_looking_ahead_changes_no_mask(state_of: Callable[[Grammar, str], GrammarState]) -> None:
    for text in ("", "{", '{"', '{"cust', '{"customer_identification_number": 1'):
        looked, plain = state_of(SCHEMA, text), state_of(SCHEMA, text)
        masks = np.zeros((2, 128), dtype=np.int32)
        looked.forced_tokens()
        looked.fill_mask(masks, 0)
        plain.fill_mask(masks, 1)
        assert masks.any() and (masks[0] == masks[1]).all()
        token = int(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))[-1])
        assert looked.accept(token) and plain.accept(token)
        looked.fill_mask(masks, 0)
        plain.fill_mask(masks, 1)
        assert (masks[0] == masks[1]).all()


def test_it_is_the_text_that_xgrammar_finds(
    tokenizer: Tokenizer, state_of: Callable[[Grammar, str], GrammarState]
) -> None:
    state = state_of(SCHEMA, "")
    num_forced = 0
    for token in tokenizer.encode(
        '{"customer_identification_number": 12, "preferred_delivery_address": "x"}'
    ).ids:
        matcher = state._matcher
        assert isinstance(matcher, XGrammarMatcher)
        expected = matcher._matcher.find_jump_forward_string()
        assert tokenizer.decode(matcher.forced_tokens()) == expected
        num_forced += bool(expected)
        assert state.accept(token)
    assert num_forced > 5
