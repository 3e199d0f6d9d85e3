"""Random grammars, random walks: no mask lets an illegal token through, and replaying is the same as going on."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.grammar.state import GrammarState
from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.protocol.sampling_params import Grammar
from tests.modelzoo import EOS_TOKEN_ID, write_tokenizer

VOCAB_SIZE = 500
MAX_STEPS = 40


class World:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, vocab_size=400)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend = XGrammarBackend.load(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as the module
    def compiled(self, grammar: Grammar) -> Any:
        return self.backend.compile(grammar)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tokenizer"))


def allowed(state: GrammarState) -> list[int]:
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    state.fill_mask(mask, 0)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any(), "a token beyond the vocabulary"
    return [int(i) for i in np.nonzero(bits)[0]]


def walk(world: World, grammar: Grammar, rng: random.Random) -> list[int]:
    """Random allowed tokens until the end, or as many as there is patience for."""
    state, ids = GrammarState(world.compiled(grammar)), list[int]()
    while not state.is_terminated and len(ids) < MAX_STEPS:
        ids.append(rng.choice(allowed(state)))
        assert state.accept(ids[-1])
    return ids


ATOMS = st.sampled_from(["a", "[b-e]", "[0-9]", "fox", "(x|yz)", " ", "é"])
REPEATS = st.sampled_from(["", "?", "+", "*", "{2}", "{1,3}"])
PATTERNS = st.lists(st.tuples(ATOMS, REPEATS), min_size=1, max_size=5).map(
    lambda parts: "".join(f"({atom}){repeat}" for atom, repeat in parts)
)


@given(pattern=PATTERNS, seed=st.integers(0, 2**32))
@settings(max_examples=120)
def test_what_the_masks_allow_matches_the_regex(world: World, pattern: str, seed: int) -> None:
    """Python's own `re` is the judge."""
    ids = walk(world, Grammar("regex", pattern), random.Random(seed))
    if ids[-1] == EOS_TOKEN_ID:
        assert re.fullmatch(pattern, world.tokenizer.decode(ids[:-1]))
        assert EOS_TOKEN_ID not in ids[:-1]


@given(pattern=PATTERNS, seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_mask_allows_exactly_what_is_accepted(world: World, pattern: str, seed: int) -> None:
    """Tried out token by token, so that nothing legal is kept out either."""
    rng = random.Random(seed)
    grammar = Grammar("regex", pattern)
    ids = walk(world, grammar, rng)
    ids = ids[: rng.randrange(len(ids))]
    here = GrammarState(world.compiled(grammar))
    assert here.follow(ids, 0)
    for token in rng.sample(range(VOCAB_SIZE), 60) + [EOS_TOKEN_ID]:
        trial = GrammarState(world.compiled(grammar))
        assert trial.follow(ids, 0)
        assert trial.accept(token) == (token in allowed(here))


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "boolean"},
        {"enum": ["a", 1, None]},
        {"type": "string", "pattern": "^[a-z]{0,3}$"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": {f"p{i}": p for i, p in enumerate(properties)},
                "required": [f"p{i}" for i in range(len(properties))],
            }
        ),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
    ),
    max_leaves=4,
)


def fits(value: object, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"], value:
        case "integer", int():
            return not isinstance(value, bool) and 0 <= value <= 20
        case "boolean", bool():
            return True
        case "string", str():
            return re.fullmatch("[a-z]{0,3}", value) is not None
        case "array", list():
            return len(value) <= 2 and all(fits(item, schema["items"]) for item in value)
        case "object", dict():
            properties = schema["properties"]
            return list(value) == list(properties) and all(fits(value[k], properties[k]) for k in value)
    return False


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_replaying_is_the_same_as_going_on(world: World, schema: dict[str, Any], seed: int) -> None:
    """At every token, a state that was built anew allows what the one that went along allows."""
    grammar = Grammar("json_schema", json.dumps(schema))
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(3)]
    state, ids = GrammarState(world.compiled(grammar)), list(prompt)
    while not state.is_terminated and len(ids) < MAX_STEPS:
        anew = GrammarState(world.compiled(grammar))
        cut = rng.randint(len(prompt), len(ids))
        assert anew.follow(ids[:cut], len(prompt))  # some by one call, the rest by another
        assert anew.follow(ids, len(prompt))
        now = allowed(state)
        assert allowed(anew) == now
        ids.append(rng.choice(now))
        assert state.follow(ids, len(prompt))
    if state.is_terminated:
        assert fits(json.loads(world.tokenizer.decode(ids[len(prompt) : -1])), schema)
