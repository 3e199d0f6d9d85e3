"""Constrained outputs of a running service with the built-in model, by OpenAI's client and by the native route."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.processes import NODE_FLAGS, Router

pytestmark = pytest.mark.processes

PROMPT = "def main():\n    return "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 1, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["slow", "fast"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
}
CLOSING_BRACE = 93
"""The token of the built-in model; biased towards it, its objects come to an end."""
RESPONSE_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    flags = (
        *("--local", "1P1D", *NODE_FLAGS, "--max-total-tokens", "8192"),
        *("--local-prefill-tokens", "0", "--debug-checks"),
    )
    with Router(tmp_path_factory.mktemp("grammars"), *flags) as router:
        yield router.wait_ready()
        router.wait_home()
        assert router.stop() == 0
        router.assert_clean_log()


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) == SCHEMA["required"]
    assert isinstance(found["name"], str) and len(found["name"]) <= 12
    assert 1 <= found["count"] <= 40
    assert 1 <= len(found["tags"]) <= 3 and set(found["tags"]) <= {"slow", "fast"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_response_format_gives_what_the_schema_says(client: openai.OpenAI, temperature: int) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "name a thing"}],
        max_tokens=400,
        temperature=temperature,
        seed=1,
        n=3,
        response_format=RESPONSE_FORMAT,
    )
    for choice in answer.choices:
        check_schema(choice.message.content or "")
        assert choice.finish_reason == "stop"


def test_json_object_gives_an_object_as_far_as_it_goes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "name a thing"}],
        max_tokens=400,
        temperature=0,
        logit_bias={str(CLOSING_BRACE): 100},
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_adds_up_to_it(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="default",
        prompt=PROMPT,
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"response_format": RESPONSE_FORMAT},
    )
    chunks = list(stream)
    assert len(chunks) > 5
    check_schema("".join(chunk.choices[0].text for chunk in chunks))


@pytest.mark.parametrize(
    ("field", "grammar", "pattern"),
    [
        ("regex", "[a-f]{4}-[0-9]{2}", "[a-f]{4}-[0-9]{2}"),
        ("ebnf", 'root ::= "yes" | "no" | "may" "be"', "yes|no|maybe"),
        ("json_schema", '{"enum": ["a", 17]}', '"a"|17'),
    ],
)
def test_native_grammars(router: Router, field: str, grammar: str, pattern: str) -> None:
    params = {
        "max_new_tokens": 60,
        "temperature": 1.0,
        "sampling_seed": 2,
        "ignore_eos": True,
        field: grammar,
    }
    answer = router.post("/generate", {"text": PROMPT, "sampling_params": params}).finish().answer
    assert re.fullmatch(pattern, answer["text"].strip())
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_a_400_with_the_compilers_words(router: Router, stream: bool) -> None:
    body = {"text": PROMPT, "stream": stream, "sampling_params": {"max_new_tokens": 9, "regex": "(a"}}
    call = router.post("/generate", body).finish()
    assert call.status == 400
    assert "regex" in str(call.error) and "parenthesis is not closed" in str(call.error)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_sees_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    with pytest.raises(openai.BadRequestError, match="'type' at # cannot be enforced"):
        client.completions.create(
            model="default", prompt=PROMPT, stream=stream, extra_body={"response_format": bad}
        )


def test_in_a_batch_the_bad_one_is_named(router: Router) -> None:
    params = [{"max_new_tokens": 5}, {"max_new_tokens": 5, "ebnf": "root ::= other"}]
    call = router.post("/generate", {"text": [PROMPT, PROMPT], "sampling_params": params}).finish()
    assert call.status == 400
    assert "prompt 1: sampling_params[1].ebnf" in str(call.error)
