"""What the nodes are told of a request, read from bodies of every dialect, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.api.generate_api import GenerateBody
from router.api.openai_bodies import ChatBody, CompletionBody
from router.config import HttpOptions
from router.http.body import Body
from router.request.prompt import AnswerOptions, read_routing_key
from router.text.served_model import ServedModel
from shared.errors import RequestError
from shared.protocol.messages import Decode, Failed, Prefill
from shared.protocol.sampling_params import Grammar, SamplingParams, TokenBias
from tests.unit.router.bodies import prompts_of, validate
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer, say_nothing
from tests.unit.router.fakes import joined_pair, write_model
from tests.unit.router.sample_tokenizers import llama3

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[type[Body], dict[str, Any]] = {
    GenerateBody: {"text": ["a b c", "d"]},
    CompletionBody: {"prompt": ["a b c", "d"]},
    ChatBody: CHAT,
}
every_dialect = pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)


def asking(kind: type[Body], **sampling: object) -> dict[str, Any]:
    """A body of a dialect with these sampling parameters, which have the names of the native one."""
    if kind is GenerateBody:
        return {**BODIES[kind], "sampling_params": sampling}
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    return BODIES[kind] | {names.get(name, name): value for name, value in sampling.items()}


# ----------------------------------------------------------------------------------------------- sampling
EVERYTHING: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "frequency_penalty": -1,
    "presence_penalty": 1.5,
    "repetition_penalty": 1.25,
    "stop": ["never", "ever"],
    "stop_regex": "[0-9]+",
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "n": 2,
    "logit_bias": {"7": 1, "3": -2.5},
    "regex": "a+",
    "sampling_seed": 11,
}
OTHERWISE = {
    "stop_token_ids": (5, 6),
    "logit_bias": (TokenBias(3, -2.5), TokenBias(7, 1.0)),
    "grammar": Grammar("regex", "a+"),
}
SENT = {
    name: value for name, value in EVERYTHING.items() if name in SamplingParams.__struct_fields__
} | OTHERWISE
"""What the nodes get of it, but for the seed."""


@every_dialect
async def test_every_sampling_field_reaches_the_nodes(model: ServedModel, kind: type[Body]) -> None:
    prompt, *_ = await prompts_of(model, kind, asking(kind, **EVERYTHING))
    for choice in range(2):
        assert prompt.work_of(choice).params == SamplingParams(**SENT, seed=11 + choice)
    field = "sampling_params." if kind is GenerateBody else ""
    assert prompt.options == AnswerOptions(
        n=2,
        stop=("never", "ever"),
        stop_regex=("[0-9]+",),
        stop_regex_field=f"{field}stop_regex",
        no_stop_trim=True,
        skip_special_tokens=False,
        grammar_field=f"{field}regex",
    )


async def test_a_prompt_without_params_of_its_own_has_the_defaults(model: ServedModel) -> None:
    body = {"input_ids": [[1, 2], [3]], "sampling_params": [EVERYTHING, None]}
    _, other = await prompts_of(model, GenerateBody, body)
    params = other.work.params
    assert (params, params.max_new_tokens) == (SamplingParams(seed=params.seed), 128)
    (short,) = await prompts_of(model, CompletionBody, {"prompt": "a"})
    assert short.work.params.max_new_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", [GenerateBody, CompletionBody])
async def test_prompts_of_a_batch_share_a_seed_only_if_it_was_given(
    model: ServedModel, kind: type[Body], seed: int | None
) -> None:
    prompts = await prompts_of(model, kind, asking(kind, sampling_seed=seed))
    seeds = {prompt.work.params.seed for prompt in prompts}
    assert seeds == {5} if seed is not None else len(seeds) == 2


async def test_names_and_namespaces_of_a_batch(model: ServedModel) -> None:
    for rid, extra_key, expected in (
        (["a", "b"], ["x", None], [("a", "x"), ("b", "")]),
        ("batch", "tenant", [("batch_0", "tenant"), ("batch_1", "tenant")]),
    ):
        body = {"input_ids": [[1], [2]], "rid": rid, "extra_key": extra_key, "lora_path": [None, None]}
        prompts = await prompts_of(model, GenerateBody, body)
        assert [(prompt.rid, prompt.work.extra_key) for prompt in prompts] == expected
    with pytest.raises(RequestError) as refused:
        await prompts_of(model, GenerateBody, {"input_ids": [[5], [6]], "rid": ["x", "x"]})
    assert refused.value.param == "rid"


@pytest.mark.parametrize("name", ["no_stop_trim", "include_stop_str_in_output"])
async def test_what_matched_stays_by_either_name(model: ServedModel, name: str) -> None:
    for keep in (False, True):
        (prompt,) = await prompts_of(model, CompletionBody, {"prompt": "a", name: keep})
        assert prompt.options.no_stop_trim is keep


# ----------------------------------------------------------------------------------------------- the text
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model: ServedModel) -> None:
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    long = "a" * (256 * longest + 1)
    chat = [{"role": "user", "content": long[len("<|user|><|assistant|>") :]}]
    bodies = {
        GenerateBody: {"text": ["a", long]},
        CompletionBody: {"prompt": long},
        ChatBody: {"messages": chat},
    }
    for kind, body in bodies.items():
        with pytest.raises(RequestError) as refused:
            await prompts_of(model, kind, body)
        assert refused.value.code == "context_length_exceeded"
        assert f"{len(long)} characters" in refused.value.message
    assert await prompts_of(model, GenerateBody, {"text": long[:-1]}), "it is tokenized"


async def test_a_text_gets_special_tokens_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    folder, tokenizer = write_model(tmp_path), llama3()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    model, bos = ServedModel.load("bos", folder, HttpOptions()), tokenizer.token_to_id("<|bos|>")
    texts = ["The fox", "größer"]
    for given, has_bos in (
        ({}, True),
        ({"add_special_tokens": None}, True),
        ({"add_special_tokens": False}, False),
    ):
        wanted = [tuple(tokenizer.encode(text, add_special_tokens=has_bos).ids) for text in texts]
        assert all((ids[0] == bos) == has_bos for ids in wanted)
        for kind, field in ((GenerateBody, "text"), (CompletionBody, "prompt")):
            for several in (texts, texts[0]):
                prompts = await prompts_of(model, kind, {field: several, **given})
                assert [prompt.work.input_ids for prompt in prompts] == wanted[: len(prompts)]
        # In a prompt the string is the token, which comes after the one that is added (docs/http.md).
        (prompt,) = await prompts_of(model, CompletionBody, {"prompt": "<|bos|>The", **given})
        assert prompt.work.input_ids.count(bos) == 1 + has_bos
        if given != {"add_special_tokens": True}:
            (chat,) = await prompts_of(model, ChatBody, {**CHAT, **given})
            assert bos not in chat.work.input_ids, "a chat has those of its template"


# -------------------------------------------------------------------------------------- hints for scheduling
@every_dialect
async def test_priority_and_routing_key_come_from_body_or_header(
    model: ServedModel, kind: type[Body]
) -> None:
    key, header = {"routing_key": "red"}, {"x-smg-routing-key": "red"}
    for fields, headers, expected in (
        ({"priority": -7, **key}, {}, (-7, "red")),
        ({"priority": -7}, header, (-7, "red")),
        ({}, {}, (0, "")),
    ):
        prompts = await prompts_of(model, kind, {**BODIES[kind], **fields}, headers)
        assert {(prompt.work.priority, prompt.work.routing_key) for prompt in prompts} == {expected}


def test_the_body_counts_before_the_header() -> None:
    headers = {"x-smg-routing-key": "blue"}
    assert [read_routing_key(given, headers) for given in ("red", "", None)] == ["red", "", "blue"]
    assert read_routing_key(None, {}) == ""
    with pytest.raises(RequestError, match=r"routing_key .*256"):
        read_routing_key(None, {"x-smg-routing-key": "x" * 257})


@every_dialect
@pytest.mark.parametrize("priority", [-1000, 1000])
def test_the_bounds_of_a_priority_are_taken(kind: type[Body], priority: int) -> None:
    assert validate(kind, {**BODIES[kind], "priority": priority}).priority == priority  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="priority"):
        validate(kind, {**BODIES[kind], "priority": priority * 1001 // 1000})


# ----------------------------------------------------------------------------------------------- grammars
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
AS_TEXT = Grammar("json_schema", msgspec.json.encode(SCHEMA).decode())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"regex": None, "ebnf": None, "json_schema": None, "response_format": None}, None),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"json_schema": '{"type": "array"}'}, Grammar("json_schema", '{"type": "array"}')),
        ({"json_schema": SCHEMA}, AS_TEXT),
        ({"response_format": OF_SCHEMA}, AS_TEXT),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "regex": "a+"}, Grammar("regex", "a+")),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_TEXT),
        ({"response_format": {"type": "json_object", "schema": None}}, ANY_OBJECT),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody], ids=lambda kind: kind.__name__)
async def test_a_grammar_may_be_asked_for_in_each_way(
    model: ServedModel, kind: type[Body], body: dict[str, object], expected: Grammar | None
) -> None:
    prompt, *_ = await prompts_of(model, kind, {**BODIES[kind], **body})
    assert prompt.work.params.grammar == expected


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("/generate", {"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ("/generate", {"text": ["a"], "sampling_params": [{"ebnf": "x"}]}, "sampling_params[0].ebnf"),
    ("/v1/completions", {"regex": "("}, "regex"),
    ("/v1/completions", {"response_format": OF_SCHEMA}, "response_format.json_schema.schema"),
    ("/v1/completions", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ("/v1/completions", {"response_format": {"type": "json_object"}}, "response_format"),
]
"""Requests whose grammar a node refuses, and the field that is named."""


async def test_a_nodes_error_names_the_clients_field(model_folder: Path) -> None:
    async def refuse(node: FakeNode, message: Prefill | Decode) -> None:
        grammar = message.work.params.grammar
        assert grammar is not None
        node.send(Failed(message.key, 400, f"{grammar.kind}: no such thing", grammar.kind))

    async with joined_pair(model_folder, prefill=refuse, decode=say_nothing) as (_, _, client):
        for path, body, field in REFUSED:
            for stream in (False, True):
                answer = await client.post(path, json={"prompt": "a", "stream": stream, **body})
                error = answer.json()["error"]
                told = (answer.status_code, error["param"], error["message"])
                assert told == (400, field, f"{field}: no such thing")
