"""Every wrong request is told what is wrong with it, and never a 5xx or a 422."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from router.http.config import DispatchOptions, HttpOptions
from router.http.limits import HttpLimits
from shared.protocol.messages import Decode, Prefill
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fakes import byte_level_tokenizer, joined_pair, joined_router

BIG = 10**40

HELLO = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL_OF_G = {"type": "function", "function": {"name": "g"}}

VLLM_SAMPLING = {
    "use_beam_search": True,
    "prompt_logprobs": 1,
    "allowed_token_ids": [1, 2],
    "bad_words": ["hello"],
    "logits_processors": ["x"],
    "truncate_prompt_tokens": 3,
    "guided_decoding": {"regex": "a"},
}
BOTH_OPENAI = [
    *(({name: value}, f"{name} is not supported yet") for name, value in VLLM_SAMPLING.items()),
    *(
        ({name: value}, f"{name} is not supported yet")
        for name, value in {
            "lora_path": "x",
            "return_hidden_states": True,
            "return_routed_experts": True,
            "return_token_ids": True,
            "prompt_embeds": "AAAA",
            "session_params": {"id": "x"},
            "custom_logit_processor": "x",
            "data_parallel_rank": 0,
        }.items()
    ),
    ({"bootstrap_host": "x"}, "bootstrap_host is the router's to choose"),
    ({"cache_salt": "x"}, "cache_salt is called extra_key here"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false"),
]
NATIVE = [
    ({}, "exactly one of text and input_ids"),
    ({"text": "a", "input_ids": [1]}, "exactly one"),
    ({"text": 5}, "text must be a string or a list of strings, not 5"),
    ({"text": ["a", 5]}, "text[1] must be a string, not 5"),
    ({"text": []}, "text must be"),
    ({"text": ""}, "the prompt has no tokens"),
    ({"text": ["a", ""]}, "prompt 1 has no tokens"),
    ({"input_ids": []}, "input_ids must be a list of 1 or more, not []"),
    ({"input_ids": [[1], []]}, "prompt 1 has no tokens"),
    ({"input_ids": [[1], 2]}, "input_ids[1] must be a list, not 2"),
    ({"input_ids": [1, True]}, "input_ids[1] must be an integer, not true"),
    ({"input_ids": [[1], [2, "a"]]}, "input_ids[1][1] must be an integer, not 'a'"),
    ({"input_ids": [True]}, "input_ids must be a list of token ids, or a list of such lists, not [true]"),
    ({"input_ids": [1, -1]}, "input_ids[1] must be a token id from 0 to"),
    ({"input_ids": [1, BIG]}, "input_ids[1] must be a token id from 0 to"),
    ({"input_ids": [1, 10**6]}, "input_ids[1] must be a token id from 0 to"),
    ({"input_ids": [[1], [10**6]]}, "input_ids[1][0] must be a token id from 0 to"),
    ({"input_ids": [1.5]}, "input_ids must be"),
    ({"text": "a", "stream": "yes"}, "stream must be true or false, not 'yes'"),
    ({"text": "a", "rid": 7}, "rid must be a string or a list of strings"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid must be a string or a list of 2"),
    ({"text": "a", "rid": "x" * 1000}, "rid must be at most 256 characters long"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params must be one value, not a list of 1"),
    ({"text": "a", "sampling_params": 5}, "sampling_params must be an object, or a list of objects, not 5"),
    ({"text": ["a"], "sampling_params": [5]}, "sampling_params[0] must be an object, not 5"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params must be one value, or a list of 2"),
    ({"text": ["a"], "sampling_params": [{"top_p": 2}]}, "sampling_params[0].top_p must be at most 1, not 2"),
    ({"text": "a", "return_logprob": 1}, "return_logprob must be true or false, or a list of them, not 1"),
    ({"text": "a", "return_logprob": [True]}, "return_logprob must be one value"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob must be one value, or a list of 2"),
    ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num must be at most 20, not 21"),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num must be at least 0"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len must be at least -1"),
    (
        {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 2},
        "logprob_start_len must be at most 1",
    ),
    (
        {"input_ids": [[1, 2], [1]], "return_logprob": True, "logprob_start_len": 1},
        "prompt 1: logprob_start_len",
    ),
    ({"text": "a", "token_ids_logprob": [BIG]}, "token_ids_logprob[0] must be a token id from 0 to"),
    ({"text": "a", "token_ids_logprob": [10**6]}, "token_ids_logprob[0] must be a token id from 0 to"),
    ({"text": ["a", "b"], "token_ids_logprob": [[1], [99999999]]}, "token_ids_logprob[1][0] must"),
    ({"text": ["a", "b"], "token_ids_logprob": [None, [10**6]]}, "token_ids_logprob[1][0] must"),
    ({"text": "a", "token_ids_logprob": [1] * 1025}, "token_ids_logprob must be a list of at most 1024"),
    ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob must be one value, or a list of 2"),
    ({"text": "a", "return_text_in_logprobs": "x"}, "return_text_in_logprobs must be true or false"),
    *(
        ({"text": "a", name: value}, f"{name} is not supported yet")
        for name, value in {
            "lora_path": "x",
            "lora_id": "x",
            "return_hidden_states": True,
            "return_routed_experts": True,
            "return_bytes": True,
            "session_params": {"id": "x"},
            "data_parallel_rank": 0,
        }.items()
    ),
    ({"text": ["a"], "bootstrap_host": ["x"]}, "bootstrap_host is the router's to choose"),
    ({"text": "a", "priority": 1001}, "priority must be at most 1000"),
    ({"text": "a", "priority": "high"}, "priority must be an integer, not 'high'"),
    ({"text": "a", "routing_key": 7}, "routing_key must be a string, not 7"),
    ({"text": "a", "routing_key": "x" * 999}, "routing_key must be at most 256"),
    ({"text": "a", "extra_key": "x" * 999}, "extra_key must be at most 256"),
]
SAMPLING = [
    ({"temperature": -0.1}, "sampling_params.temperature must be at least 0, not -0.1"),
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
    ({"temperature": True}, "temperature must be a number, not true"),
    ({"temperature": BIG}, "temperature must be at most 1e+06"),
    ({"top_p": 0}, "top_p must be above 0, not 0"),
    ({"top_p": 1.1}, "top_p must be at most 1, not 1.1"),
    ({"top_k": 0}, "top_k must be -1 (all tokens) or at least 1, not 0"),
    ({"top_k": -2}, "top_k must be at least -1"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"min_p": 2}, "min_p must be at most 1"),
    ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, not -1"),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens must be at most the maximum"),
    ({"n": 0}, "n must be at least 1"),
    ({"n": 1000}, "n must be at most 128 (--max-n), not 1000"),
    ({"stop": 5}, "stop must be a string or a list of strings"),
    ({"stop": [""]}, "sampling_params.stop[0] must be 1 or more characters long, not ''"),
    ({"stop": ["a", 1]}, "stop[1] must be a string, not 1"),
    ({"stop": ["a"] * 1000}, "stop must be a list of at most 64 (--max-stops)"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list, not 5"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be a token id from 0 to"),
    ({"stop_token_ids": [10**6]}, "sampling_params.stop_token_ids[0] must be a token id from 0 to"),
    ({"sampling_seed": BIG}, "sampling_seed must be at most"),
    ({"sampling_seed": 1.5}, "sampling_seed must be an integer"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false"),
    ({"regex": 5}, "sampling_params.regex must be a string, not 5"),
    ({"regex": "a" * 70_000}, "sampling_params.regex must be at most 65536 characters long"),
    ({"ebnf": ["a"]}, "sampling_params.ebnf must be a string"),
    ({"json_schema": 5}, "sampling_params.json_schema must be a JSON schema"),
    ({"json_schema": {"enum": ["a" * 70_000]}}, "json_schema must be at most 65536"),
    ({"regex": "a", "ebnf": "b"}, "sampling_params.regex and sampling_params.ebnf exclude each other"),
    ({"structural_tag": "a"}, "structural_tag is not supported yet"),
    *(
        ({name: value}, f"sampling_params.{name} is {why}")
        for name, value, why in (
            *((name, value, "not supported yet") for name, value in VLLM_SAMPLING.items()),
            ("max_tokens", 5, "called max_new_tokens here"),
            ("min_tokens", 5, "called min_new_tokens here"),
            ("seed", 5, "called sampling_seed here"),
            ("logprobs", 5, "called return_logprob here"),
            ("include_stop_str_in_output", True, "called no_stop_trim here"),
        )
    ),
    ({"logit_bias": [1]}, "logit_bias must be an object, not [1]"),
    ({"logit_bias": {"-1": 2}}, "logit_bias must have token ids from 0 to"),
    ({"logit_bias": {str(BIG): 2}}, "logit_bias must have token ids from 0 to"),
    ({"logit_bias": {"the": 2}}, "sampling_params.logit_bias must have token ids from 0 to"),
    ({"logit_bias": {"1": "a"}}, "sampling_params.logit_bias.1 must be a number, not 'a'"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1 must be at most 100, not 101"),
    ({"logit_bias": {"1": -100.5}}, "logit_bias.1 must be at least -100"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must be an object of at most 1024"),
    ({"frequency_penalty": 2.5}, "frequency_penalty must be at most 2, not 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty must be at least -2"),
    ({"presence_penalty": "a"}, "presence_penalty must be a number"),
    ({"presence_penalty": 3}, "presence_penalty must be at most 2"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ({"repetition_penalty": 2.1}, "repetition_penalty must be at most 2"),
    ({"stop_regex": "(a"}, "sampling_params.stop_regex '(a' is not a pattern that can be used: missing )"),
    ({"stop_regex": ["b", "a*"]}, "sampling_params.stop_regex[1] 'a*' matches the empty text"),
    ({"stop_regex": 5}, "sampling_params.stop_regex must be a pattern or a list of patterns, not 5"),
    ({"stop_regex": [""]}, "sampling_params.stop_regex[0] must be 1 or more characters long"),
    ({"stop_regex": "a" * 1025}, "sampling_params.stop_regex must be at most 1024 characters long"),
    ({"stop_regex": ["a"] * 17}, "sampling_params.stop_regex must be a list of at most 16"),
]
COMPLETIONS = [
    ({}, "prompt is missing"),
    ({"prompt": {}}, "prompt must be"),
    ({"prompt": ["a", 1]}, "prompt[1] must be a string, not 1"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens must be at least 0"),
    ({"prompt": "a", "echo": 1}, "echo must be true or false"),
    ({"prompt": "a", "logprobs": 21}, "logprobs must be at most 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs must be an integer"),
    ({"prompt": "a", "suffix": "x"}, "suffix is not supported yet"),
    *(({"prompt": "a", **fields}, part) for fields, part in BOTH_OPENAI),
    ({"prompt": "a", "n": 3, "best_of": 2}, "best_of must be at least n, 3, not 2"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "best_of must be n, 1, in a stream"),
    ({"prompt": "a", "best_of": 129}, "best_of must be at most 128"),
    ({"prompt": "a", "stream_options": 3}, "stream_options must be an object"),
    ({"prompt": "a", "n": "2"}, "n must be an integer"),
    ({"prompt": "a", "seed": "x"}, "seed must be an integer"),
]
CHAT = [
    ({}, "messages is missing"),
    ({"messages": []}, "messages must be a list of 1 or more, not []"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a string"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": HELLO, "logprobs": 3}, "logprobs must be true or false"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most 20"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs must be left out"),
    *(
        ({"messages": HELLO, **fields}, part)
        for fields, part in (
            ({"tools": [{}]}, "tools[0].type is missing"),
            ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type must be function"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is missing"),
            ({"tools": [TOOL] * 2, "tool_choice": "required"}, "tools[1].function.name: there is another"),
            ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice must be none, auto or required, not 'f'"),
            ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
            ({"tools": [TOOL], "tool_choice": ["none"]}, "tool_choice must be none, auto, required, {"),
            ({"tools": [TOOL], "tool_choice": CALL_OF_G}, "tool_choice names 'g'"),
            ({"tool_choice": "required"}, "tool_choice needs tools"),
            ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex and tools exclude"),
            ({"functions": [{}]}, "functions is not supported: use tools"),
            ({"reasoning_effort": "most"}, "reasoning_effort must be none, minimal"),
            ({"reasoning": {"effort": "low"}}, "reasoning is not supported: use reasoning_effort"),
            ({"modalities": ["text", "audio"]}, "modalities is not supported yet"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message and"),
            ({"documents": ["a"]}, "documents[0] must be an object"),
            *BOTH_OPENAI,
        )
    ),
    *(
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, part)
        for call, part in (
            ({"function": {"name": "f", "arguments": "{"}}, "arguments is no JSON object"),
            ({"function": {"name": "f", "arguments": "[]"}}, "arguments is no JSON object"),
            ({"function": {"name": "f", "arguments": 5}}, "arguments must be an object"),
            ({"function": {}}, "messages[0].tool_calls[0].function.name is missing"),
            ({"type": "custom", "function": {"name": "f"}}, "tool_calls[0].type must be function"),
        )
    ),
    *(
        ({"messages": HELLO, "response_format": asked}, part)
        for asked, part in (
            ("json_object", "response_format must be an object, not 'json_object'"),
            ({"type": "xml"}, "response_format.type must be text, json_object or json_schema, not 'xml'"),
            ({}, "response_format.type is missing"),
            ({"type": "json_schema"}, "response_format.json_schema.schema must be a JSON schema, not null"),
            ({"type": "json_schema", "json_schema": {"schema": 1}}, "json_schema.schema must be"),
        )
    ),
    ({"messages": HELLO, "response_format": {"type": "json_object"}, "regex": "a"}, "exclude each other"),
    ({"messages": HELLO, "chat_template": "x"}, "the server's to choose"),
]
BODIES = [
    b"",
    b"{",
    b"[1]",
    b'"text"',
    b"null",
    b'{"text": NaN}',
    b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
    b'{"text": "a"} trailing',
    b"[" * 50_000,
    b'{"text": "a", "sampling_params": {"top_k": ' + b"9" * 5000 + b"}}",
    b"\x00\x01\x02",
    b'\xef\xbb\xbf{"text": "a"}',
    '{"text": "a"}'.encode("utf-16"),
    b"text=a&max_tokens=3",
]


def check_refusal(response: httpx.Response, part: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert part in error["message"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str)
    assert len(error["message"]) < 400


async def test_wrong_fields(model_folder: Path) -> None:
    native = [*NATIVE, *(({"text": "a", "sampling_params": params}, part) for params, part in SAMPLING)]
    table = [
        *(("/generate", body, part) for body, part in native),
        *(("/v1/completions", body, part) for body, part in COMPLETIONS),
        *(("/v1/chat/completions", body, part) for body, part in CHAT),
    ]

    async with joined_pair(model_folder) as (nodes, _, client):
        for path, body, part in table:
            for stream in (False, True):
                sent = {"stream": True, **body} if stream else body
                check_refusal(await client.post(path, content=json.dumps(sent)), part)
        assert not nodes[0].all(Prefill) and not nodes[1].all(Decode)


async def test_bodies_that_are_no_json_object(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/abort_request"):
            for body in BODIES:
                check_refusal(await client.post(path, content=body), "")


async def test_what_is_taken_as_it_comes(model_folder: Path) -> None:
    """curl -d says that it sends a form; of two fields with one name the last counts; NUL is a character."""
    async with joined_pair(model_folder) as (nodes, _, client):
        body = b'{"text": 5, "text": "a\\u0000b", "sampling_params": {"max_new_tokens": 1}}'
        for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=latin-1"):
            answer = await client.post("/generate", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 200
        assert byte_level_tokenizer().decode(list(nodes[0].all(Prefill)[0].work.input_ids)) == "a\0b"


async def test_null_means_default_and_unknown_fields_are_tolerated(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_new_tokens",
            "n",
            "stop",
            "regex",
            "json_schema",
        )
        body = {
            "text": "a",
            "sampling_params": {**dict.fromkeys(names), "made_up": 1},
            **dict.fromkeys(("stream", "rid", "lora_path", "return_logprob", "input_ids", "image_data")),
            "whatever": {"x": 1},
        }
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 200
        assert nodes[0].all(Prefill)[0].work.params.max_new_tokens == 128
        off = {"use_beam_search": False, "bad_words": [], "allowed_token_ids": None}
        native = {"return_routed_experts": [False], "return_bytes": False, "session_params": {}}
        openai = {"return_token_ids": False, "return_hidden_states": False, "cache_salt": None}
        for path, body in (
            ("/generate", {"text": ["a"], "sampling_params": {**off, "min_tokens": 0}, **native}),
            ("/v1/completions", {"prompt": "a", **off, **openai}),
        ):
            assert (await client.post(path, json=body)).status_code == 200


async def test_routes_and_methods(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for response, status in (
            (await client.get("/nowhere"), 404),
            (await client.get("/health/"), 404),  # a redirect would go where Host says
            (await client.get("/generate"), 405),
            (await client.delete("/v1/models"), 405),
            (await client.get("/v1/models/other"), 404),
            (await client.post("/flush_cache?timeout=soon"), 400),
            (await client.post("/abort_request", json={}), 400),
            (await client.post("/tokenize", json={"prompt": 5}), 400),
            (await client.post("/detokenize", json={"tokens": [BIG]}), 400),
        ):
            assert response.status_code == status
            assert response.json()["error"]["message"]
            code = "model_not_found" if "models/" in str(response.url) else None
            assert response.json()["error"]["code"] == code, "the name of what is wrong, or none"


async def test_body_size_and_batch_size_are_bounded(model_folder: Path) -> None:
    http = HttpOptions(port=0, limits=HttpLimits(max_body_bytes=2000, max_batch_size=4))
    async with joined_pair(model_folder, http=http) as (_, _, client):
        declared = await client.post("/generate", json={"text": "x" * 3000})
        assert declared.status_code == 413
        assert "2000 bytes (--max-body-bytes)" in declared.json()["error"]["message"]
        chat = {"messages": HELLO}
        for path, body, count, param in (
            ("/generate", {"text": ["a"] * 5}, 5, "text"),
            ("/generate", {"input_ids": [[1]] * 5}, 5, "input_ids"),
            ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6, "sampling_params"),
            ("/v1/completions", {"prompt": ["a"] * 5}, 5, "prompt"),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6, "n"),
            ("/v1/completions", {"prompt": ["a", "b"], "best_of": 3}, 6, "best_of"),
            ("/v1/chat/completions", {**chat, "n": 5}, 5, "n"),
            ("/tokenize", {"prompt": ["a"] * 5}, 5, "prompt"),
        ):
            refused = await client.post(path, json=body)
            check_refusal(refused, f"{count} sequences in one request; at most 4")
            assert refused.json()["error"]["param"] == param


LIMITED = [
    ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n must be at most 2"),
    ("/v1/completions", {"prompt": "a", "n": 3}, "n must be at most 2 (--max-n), not 3"),
    ("/generate", {"text": ["a"], "sampling_params": [{"stop": ["a", "b"]}]}, "sampling_params[0].stop"),
    ("/generate", {"text": "a", "top_logprobs_num": 5}, "top_logprobs_num must be at most 4"),
    ("/generate", {"text": ["a", "b"], "top_logprobs_num": [None, 5]}, "top_logprobs_num[1] must"),
    ("/v1/completions", {"prompt": "a", "logprobs": 5}, "logprobs must be at most 4 (--max-logprobs)"),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "logprobs": True, "top_logprobs": 5},
        "top_logprobs must be at most 4",
    ),
    ("/v1/completions", {"prompt": "a", "regex": "x" * 11}, "regex must be at most 10 characters"),
    ("/v1/completions", {"prompt": "a", "json_schema": {"type": "null"}}, "json_schema must be at most 10"),
    (
        "/generate",
        {"input_ids": [[1], [1] * 41]},
        "prompt 1 has 41 tokens; at most 40 are taken (--max-prompt-tokens): "
        "This model's maximum context length is 40 tokens",
    ),
    ("/generate", {"text": "x " * 90}, "tokens; at most 40 are taken"),
    ("/v1/completions", {"prompt": [1] * 41}, "the prompt has 41 tokens; at most 40 are taken"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x " * 90}]},
        "tokens; at most 40 are taken",
    ),
]


async def test_limits_that_the_operator_set(model_folder: Path) -> None:
    limits = HttpLimits(
        max_n=2, max_stops=1, max_logprobs=4, max_grammar_chars=10, max_prompt_tokens=40, max_batch_size=3
    )

    http = HttpOptions(port=0, limits=limits)
    async with joined_pair(model_folder, http=http) as (_, _, client):
        for path, body, part in LIMITED:
            check_refusal(await client.post(path, json=body), part)
        at_the_limits = {
            "input_ids": [1] * 40,
            "sampling_params": {"n": 2, "stop": "x", "regex": "x" * 10, "max_new_tokens": 1},
            "top_logprobs_num": 4,
        }
        assert (await client.post("/generate", json=at_the_limits)).status_code == 200
        shown = (await client.get("/server_info")).json()
        assert (shown["max_prompt_tokens"], shown["max_n"], shown["max_grammar_chars"]) == (40, 2, 10)


async def test_nothing_is_alive(model_folder: Path) -> None:
    async with joined_router(model_folder, [], wait=False) as (_, client):
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "starting"
        for stream in (False, True):
            async with asyncio.timeout(30):
                response = await client.post("/generate", json={"text": "a", "stream": stream})
            assert response.status_code == 503 and "there is none" in response.json()["error"]["message"]
            assert response.headers["retry-after"]


async def test_a_request_waits_no_longer_for_a_decode_node_than_it_may(model_folder: Path) -> None:
    dispatch = DispatchOptions(failover_timeout_s=0.01)

    async with joined_router(model_folder, [], dispatch=dispatch, wait=False) as (_, client):
        seconds: list[float] = []
        for _ in range(5):
            began = time.monotonic()
            assert (await client.post("/generate", json={"text": "a"})).status_code == 503
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 1, "that is how often it looks for one"


async def test_a_request_waits_for_a_decode_node(model_folder: Path) -> None:
    dispatch = DispatchOptions(local_prefill_tokens=0, failover_timeout_s=PATIENCE_S)

    async with joined_pair(model_folder, dispatch=dispatch) as (nodes, _, client):
        decode = nodes[1]
        await decode.stop()

        async def is_lost() -> bool:
            return (await client.get("/health")).status_code == 503

        await eventually(is_lost)
        calls = [
            asyncio.create_task(client.post("/generate", json={"input_ids": [1, 2, 3], "rid": rid}))
            for rid in ("served", "aborted")
        ]
        assert not (await asyncio.wait(calls, timeout=0.5))[0]
        await client.post("/abort_request", json={"rid": "aborted"})
        aborted = (await calls[1]).json()
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        decode.start(decode.port, "b")
        assert (await calls[0]).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_the_model_is_not_known_yet(path: str) -> None:
    async with joined_router(None, [], wait=False) as (_, client):
        response = await client.post(path, json={"text": "a", "prompt": "a"})
        assert response.status_code == 503 and response.json()["error"]["code"] == "starting"


async def test_a_prompt_without_room_for_output_names_its_field(model_folder: Path) -> None:
    long = [1] * 256

    async with joined_pair(model_folder) as (_, _, client):
        for path, body, param in (
            ("/generate", {"input_ids": long}, "input_ids"),
            ("/generate", {"input_ids": [[1], long]}, "input_ids"),
            ("/v1/completions", {"prompt": long}, "prompt"),
        ):
            refused = await client.post(path, json=body)
            check_refusal(refused, "leaves no room for output")
            assert "This model's maximum context length is 200 tokens" in refused.text
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("Identity", 200)])
async def test_a_compressed_body_is_said_to_be_one(model_folder: Path, encoding: str, status: int) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            answer = await client.post(path, json=body, headers={"content-encoding": encoding})
            assert answer.status_code == status
            if status == 415:
                error = answer.json()["error"]
                assert f"content-encoding '{encoding}'" in error["message"]
                assert error["type"] == "unsupported_media_type"
