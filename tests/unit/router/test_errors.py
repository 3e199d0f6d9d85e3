"""Every wrong request is told what is wrong with it, and never a 5xx or a 422."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from router.config import DispatchOptions, HttpLimits, HttpOptions
from shared.protocol.messages import Decode, Prefill
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import byte_level_tokenizer
from tests.unit.router.fakes import joined_pair, joined_router

BIG = 10**40

HELLO = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL_OF_G = {"type": "function", "function": {"name": "g"}}

Wrong = dict[str, list[object]]
"""For each field, values that are refused with the field as `param`, or a part of it."""
UNSERVED: Wrong = {
    "use_beam_search": [True],
    "prompt_logprobs": [1],
    "allowed_token_ids": [[1, 2]],
    "bad_words": [["hello"]],
    "logits_processors": [["x"]],
    "truncate_prompt_tokens": [3],
    "guided_decoding": [{"regex": "a"}],
}
UNSERVED_ANYWHERE: Wrong = {
    "lora_path": ["x"],
    "return_hidden_states": [True],
    "return_routed_experts": [True],
    "session_params": [{"id": "x"}],
    "data_parallel_rank": [0],
}
SAMPLING: Wrong = UNSERVED | {
    "temperature": [-0.1, "hot", True, BIG],
    "top_p": [0, 1.1],
    "top_k": [0, -2, 1.5],
    "min_p": [2],
    "max_new_tokens": [-1],
    "n": [0, 129],
    "stop": [5, [""], ["a", 1], ["a"] * 65],
    "stop_token_ids": [5, [-1], [10**6]],
    "sampling_seed": [BIG, 1.5],
    "ignore_eos": [1],
    "regex": [5, "a" * 70_000],
    "ebnf": [["a"]],
    "json_schema": [5, {"enum": ["a" * 70_000]}],
    "structural_tag": ["a"],
    "max_tokens": [5],
    "min_tokens": [5],
    "seed": [5],
    "logprobs": [5],
    "include_stop_str_in_output": [True],
    "add_special_tokens": [False],
    "logit_bias": [
        *([1], {"-1": 2}, {str(BIG): 2}, {"the": 2}, {"1": "a"}, {"1": 101}, {"1": -100.5}),
        {str(i): 1 for i in range(1025)},
    ],
    "frequency_penalty": [2.5, -2.5],
    "presence_penalty": ["a", 3],
    "repetition_penalty": [0, 2.1],
    "stop_regex": ["(a", ["b", "a*"], 5, [""], "a" * 1025, ["a"] * 17],
}
NATIVE: Wrong = UNSERVED_ANYWHERE | {
    "text": [5, ["a", 5], [], "", ["a", ""]],
    "stream": ["yes"],
    "rid": [7, "x" * 1000],
    "sampling_params": [[{}], 5, {"max_new_tokens": 4, "min_new_tokens": 5}, {"regex": "a", "ebnf": "b"}],
    "return_logprob": [1, [True]],
    "top_logprobs_num": [21, -1],
    "logprob_start_len": [-2],
    "token_ids_logprob": [[BIG], [10**6], [1] * 1025],
    "return_text_in_logprobs": ["x"],
    "lora_id": ["x"],
    "return_bytes": [True],
    "bootstrap_host": [["x"]],
    "add_special_tokens": ["no"],
    "priority": [1001, "high"],
    "routing_key": [7, "x" * 999],
    "extra_key": ["x" * 999],
}
IDS: Wrong = {
    "input_ids": [
        *([], [[1], []], [[1], 2], [1, True], [[1], [2, "a"]], [True], [1, -1], [1, BIG], [1, 10**6]),
        *([[1], [10**6]], [1.5]),
    ]
}
BATCH: Wrong = {
    "rid": [["x"]],
    "sampling_params": [[{}, 5], [{}], [{"top_p": 2}, {}]],
    "return_logprob": [[True]],
    "token_ids_logprob": [[[1], [99999999]], [None, [10**6]], [[1]]],
}
OPENAI: Wrong = (
    UNSERVED
    | UNSERVED_ANYWHERE
    | {
        "return_token_ids": [True],
        "prompt_embeds": ["AAAA"],
        "custom_logit_processor": ["x"],
        "bootstrap_host": ["x"],
        "cache_salt": ["x"],
        "include_stop_str_in_output": [1],
        "n": ["2"],
        "seed": ["x"],
        "max_tokens": [-5],
        "stream_options": [3],
        "response_format": [
            *("json_object", {"type": "xml"}, {}, {"type": "json_schema"}),
            {"type": "json_schema", "json_schema": {"schema": 1}},
        ],
    }
)
COMPLETIONS: Wrong = OPENAI | {
    "prompt": [{}, ["a", 1], None],
    "echo": [1],
    "logprobs": [21, True],
    "suffix": ["x"],
    "add_special_tokens": [0],
    "best_of": [129],
}
MESSAGE = {"role": "assistant", "content": None}
CHAT: Wrong = OPENAI | {
    "messages": [
        *(None, [], ["hi"], [{"role": "user"}], [{"role": "king", "content": "x"}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{**MESSAGE, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{**MESSAGE, "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
        [{**MESSAGE, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        [{**MESSAGE, "tool_calls": [{"function": {}}]}],
        [{**MESSAGE, "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
    ],
    "logprobs": [3],
    "top_logprobs": [2, 21],
    "tools": [[{}], [{"type": "code_interpreter"}], [{"type": "function", "function": {}}]],
    "tool_choice": ["required", ["none"]],
    "functions": [[{}]],
    "reasoning_effort": ["most"],
    "reasoning": [{"effort": "low"}],
    "modalities": [["text", "audio"]],
    "documents": [["a"]],
    "chat_template": ["x"],
    "add_special_tokens": [True],
}
TOOLS: Wrong = {"tool_choice": ["f", {"type": "function"}, CALL_OF_G, ["none"]]}
TABLE: list[tuple[str, dict[str, object], Wrong]] = [
    ("/generate", {"text": "a"}, NATIVE),
    ("/generate", {}, IDS),
    ("/generate", {"text": ["a", "b"]}, BATCH),
    ("/v1/completions", {"prompt": "a"}, COMPLETIONS),
    ("/v1/chat/completions", {"messages": HELLO}, CHAT),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL]}, TOOLS),
]
TOGETHER: list[tuple[str, dict[str, object], str]] = [
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    ("/generate", {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ("/generate", {"input_ids": [[1, 2], [1]], "return_logprob": True, "logprob_start_len": 1},
     "logprob_start_len"),
    ("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL] * 2, "tool_choice": "required"},
     "tools[1].function.name"),
    *(("/v1/chat/completions",
       {"messages": HELLO, "tools": [{**TOOL, "function": {"name": name}}], "tool_choice": "required"},
       "tools[0].function.name") for name in ('a"b', "a\\b", "a\n", "a b", "</tool_call>")),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "regex": "a"},
     "tools"),
    ("/v1/chat/completions",
     {"messages": HELLO, "tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "string"}}}],
      "tool_choice": "required"}, "tools[0].function.parameters.type"),
    ("/v1/chat/completions",
     {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}, "regex": "a"},
     "response_format"),
]  # fmt: skip
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


def check_refusal(response: httpx.Response, param: str | None) -> None:
    """That it names the field in its message and as `param`, and neither fails nor repeats a whole prompt."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400
    if param is not None:
        assert str(error["param"]).startswith(param), error
        field = error["param"].removeprefix("sampling_params.").partition("[")[0]
        assert field in error["message"] or "prompt" in error["message"], error


async def test_wrong_fields(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        for path, base, wrong in TABLE:
            for field, values in wrong.items():
                for value in values:
                    check_refusal(await client.post(path, json={**base, field: value}), field)
        for field, values in SAMPLING.items():
            for value in values:
                body = {"text": "a", "sampling_params": {field: value}}
                check_refusal(await client.post("/generate", json=body), f"sampling_params.{field}")
        for path, body, field in TOGETHER:
            check_refusal(await client.post(path, json=body), field)
        assert not nodes[0].all(Prefill) and not nodes[1].all(Decode)


async def test_bodies_that_are_no_json_object(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/abort_request"):
            for body in BODIES:
                check_refusal(await client.post(path, content=body), None)


async def test_a_body_of_nothing_but_lists_or_fields_is_not_decoded(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        tiny = b'{"input_ids": [' + b"[1]," * (1 << 18) + b"[1]]}"
        fields = b"{" + b",".join(b'"%x" :1' % i for i in range((1 << 19) + 1)) + b"}"
        for body, most in ((tiny, 1 << 18), (fields, 1 << 19)):
            refused = await client.post("/generate", content=body)
            assert refused.status_code == 400 and str(most) in refused.text


async def test_what_is_taken_as_it_comes(model_folder: Path) -> None:
    """curl -d says that it sends a form; of two fields with one name the last counts; NUL is a character."""
    async with joined_pair(model_folder) as (nodes, _, client):
        body = b'{"text": 5, "text": "a\\u0000b", "sampling_params": {"max_new_tokens": 1}}'
        for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=latin-1"):
            answer = await client.post("/generate", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 200
        assert byte_level_tokenizer().decode(list(nodes[0].all(Prefill)[0].work.input_ids)) == "a\0b"


async def test_null_means_default_and_unknown_fields_are_tolerated(model_folder: Path) -> None:
    sampling = {**dict.fromkeys(SAMPLING), "made_up": 1}
    body = {**dict.fromkeys(NATIVE), "text": "a", "sampling_params": sampling, "whatever": {"x": 1}}
    off = {"use_beam_search": False, "bad_words": [], "allowed_token_ids": None}
    native = {"return_routed_experts": [False], "return_bytes": False, "session_params": {}}
    openai = {"return_token_ids": False, "return_hidden_states": False, "cache_salt": None}
    async with joined_pair(model_folder) as (nodes, _, client):
        assert (await client.post("/generate", json=body)).status_code == 200
        assert nodes[0].all(Prefill)[0].work.params.max_new_tokens == 128
        for path, harmless in (
            ("/generate", {"text": ["a"], "sampling_params": {**off, "min_tokens": 0}, **native}),
            ("/v1/completions", {"prompt": "a", **off, **openai}),
        ):
            assert (await client.post(path, json=harmless)).status_code == 200


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
        assert (await client.post("/generate", json={"text": "x" * 3000})).status_code == 413
        for path, body, param in (
            ("/generate", {"text": ["a"] * 5}, "text"),
            ("/generate", {"input_ids": [[1]] * 5}, "input_ids"),
            ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, "sampling_params"),
            ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, "n"),
            ("/v1/completions", {"prompt": ["a", "b"], "best_of": 3}, "best_of"),
            ("/v1/chat/completions", {"messages": HELLO, "n": 5}, "n"),
            ("/tokenize", {"prompt": ["a"] * 5}, "prompt"),
        ):
            check_refusal(await client.post(path, json=body), param)


LONG = [{"role": "user", "content": "x " * 90}]
LIMITED: list[tuple[str, dict[str, object], str]] = [
    ("/generate", {"input_ids": [[1], [1] * 41]}, "input_ids"),
    ("/generate", {"text": "x " * 90}, "text"),
    ("/v1/completions", {"prompt": [1] * 41}, "prompt"),
    ("/v1/chat/completions", {"messages": LONG}, "messages"),
]
"""One more than the limits of the next test."""


async def test_limits_that_the_operator_set(model_folder: Path) -> None:
    http = HttpOptions(port=0, limits=HttpLimits(max_prompt_tokens=40))
    async with joined_pair(model_folder, http=http) as (_, _, client):
        for path, body, param in LIMITED:
            check_refusal(await client.post(path, json=body), param)
        at_the_limit = {"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 1}}
        assert (await client.post("/generate", json=at_the_limit)).status_code == 200
        assert (await client.get("/server_info")).json()["max_prompt_tokens"] == 40


async def test_nothing_is_alive(model_folder: Path) -> None:
    """A request waits no longer for a decode node than it may, though it looks for one once a second."""
    dispatch = DispatchOptions(failover_timeout_s=0.01)
    async with joined_router(model_folder, [], dispatch=dispatch, wait=False) as (_, client):
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "starting"
        seconds: list[float] = []
        for stream in (False, True, False, True):
            began = time.monotonic()
            response = await client.post("/generate", json={"text": "a", "stream": stream})
            assert response.status_code == 503 and response.headers["retry-after"]
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
            check_refusal(refused, param)
            assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("Identity", 200)])
async def test_a_compressed_body_is_said_to_be_one(model_folder: Path, encoding: str, status: int) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        answer = await client.post("/generate", json={"text": "a"}, headers={"content-encoding": encoding})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["type"] == "unsupported_media_type"
