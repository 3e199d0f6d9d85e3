"""What SGLang's clients may send to /generate and its neighbours, field by field, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.protocol.messages import Prefill
from shared.protocol.sampling_params import Grammar, SamplingParams, TokenBias
from tests.unit.router.fake_node import EOS, FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import events, joined_pair
from tests.unit.router.scoring import scored_first_token, scored_story

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


def of_prompt(node: FakeNode, first_id: int) -> list[Prefill]:
    return [sent for sent in node.all(Prefill) if sent.work.input_ids[0] == first_id]


async def test_every_sampling_field_reaches_the_nodes_for_its_prompt_alone(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        body = {"input_ids": [[1, 2], [3]], "sampling_params": [EVERYTHING, None]}
        answer = await client.put("/generate", json=body)
        assert answer.status_code == 200
        assert [len(a["output_ids"]) for a in answer.json()] == [3, 3, 128]
        first, second = sorted((w.work.params for w in of_prompt(nodes[0], 1)), key=lambda p: p.seed)
        assert first == SamplingParams(**SENT, seed=11)
        assert second == SamplingParams(**SENT, seed=12)
        (other,) = of_prompt(nodes[0], 3)
        assert other.work.params == SamplingParams(seed=other.work.params.seed)


@pytest.mark.parametrize("seed", [None, 5])
async def test_prompts_of_a_batch_share_a_seed_only_if_it_was_given(
    model_folder: Path, seed: int | None
) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        bodies = {
            "/generate": {"text": ["a"] * 3, "sampling_params": {"max_new_tokens": 1, "sampling_seed": seed}},
            "/v1/completions": {"prompt": ["a"] * 3, "max_tokens": 1, "seed": seed},
        }
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200
        seeds = [sent.work.params.seed for sent in nodes[0].all(Prefill)]
        assert len(seeds) == 6
        assert set(seeds) == {5} if seed is not None else len(set(seeds)) == 6


async def test_names_and_namespaces_of_a_batch(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        params = {"max_new_tokens": 1}
        body = {"input_ids": [[1], [2]], "rid": ["a", "b"], "extra_key": ["x", None]}
        answer = await client.post("/generate", json={**body, "sampling_params": params})
        assert [a["meta_info"]["id"] for a in answer.json()] == ["a", "b"]
        assert [of_prompt(nodes[0], i)[0].work.extra_key for i in (1, 2)] == ["x", ""]
        body = {"input_ids": [[3], [4]], "rid": "batch", "extra_key": "tenant", "lora_path": [None, None]}
        answer = await client.post("/generate", json={**body, "sampling_params": params})
        assert [a["meta_info"]["id"] for a in answer.json()] == ["batch_0", "batch_1"]
        assert {of_prompt(nodes[0], i)[0].work.extra_key for i in (3, 4)} == {"tenant"}
        twice = await client.post("/generate", json={"input_ids": [[5], [6]], "rid": ["x", "x"]})
        assert twice.status_code == 400 and "'x'" in twice.json()["error"]["message"]


async def test_a_streamed_batch_with_an_n_and_logprobs_for_each_prompt(model_folder: Path) -> None:
    async with joined_pair(model_folder, prefill=scored_first_token, decode=scored_story) as (_, _, client):
        body = {
            "input_ids": [[1, 2], [3, 4]],
            "sampling_params": [{"max_new_tokens": 3, "n": 2}, {"max_new_tokens": 2}],
            "return_logprob": [None, True],
            "logprob_start_len": [0, 0],
            "top_logprobs_num": [5, None],
            "token_ids_logprob": [None, [7, 8]],
            "stream": True,
        }
        *seen, done = events((await client.post("/generate", json=body)).text)
        assert done == "[DONE]"
        num_told: dict[int, int] = {}
        for event in seen:
            index, ids = event["index"], event["output_ids"]
            assert len(ids) >= num_told.get(index, 0), "events are cumulative"
            num_told[index] = len(ids)
            names = {name for name in event["meta_info"] if "logprobs" in name}
            scored = {f"{side}_token{what}_logprobs" for side in ("input", "output") for what in ("", "_ids")}
            assert names == (scored if index == 2 else set())
        assert num_told == {0: 3, 1: 3, 2: 2}


async def test_special_tokens_are_in_the_text_if_they_are_wanted(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, client):
        for node in nodes:
            node.story = byte_level_tokenizer().encode(f"a{EOS}b").ids
        params = [{"max_new_tokens": 3, "skip_special_tokens": skip} for skip in (True, False)]
        answer = await client.post("/generate", json={"input_ids": [[1], [2]], "sampling_params": params})
        assert [one["text"] for one in answer.json()] == ["ab", f"a{EOS}b"]


async def test_tokens_of_a_text_and_back(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        for path in ("/tokenize", "/v1/tokenize"):
            found = (await client.post(path, json={"prompt": "The quick"})).json()
            assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 256
        for path in ("/detokenize", "/v1/detokenize"):
            ids = found["tokens"] * 1000  # in a thread
            text = (await client.post(path, json={"tokens": ids})).json()["text"]
            assert text == "The quick" * 1000
        many = (await client.post("/tokenize", json={"prompt": ["a", "日本"]})).json()
        back = await client.post("/detokenize", json={"tokens": many["tokens"]})
        assert back.json()["text"] == ["a", "日本"] and many["count"] == [len(row) for row in many["tokens"]]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model_folder: Path) -> None:
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    long = "a" * (256 * longest + 1)
    chat = [{"role": "user", "content": long[len("<|user|><|assistant|>") :]}]
    async with joined_pair(model_folder) as (_, _, client):
        for path, body in (
            ("/generate", {"text": ["a", long]}),
            ("/v1/completions", {"prompt": long}),
            ("/tokenize", {"prompt": long}),
            ("/v1/chat/completions", {"messages": chat}),
        ):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert f"{len(long)} characters" in refused.text
        fits = await client.post("/generate", json={"text": long[:-1]})
        assert "characters" not in fits.text, "it is tokenized"


async def test_a_body_of_nothing_but_lists_or_fields_is_not_decoded(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        tiny = b'{"input_ids": [' + b"[1]," * (1 << 18) + b"[1]]}"
        fields = b"{" + b",".join(b'"%x" :1' % i for i in range((1 << 19) + 1)) + b"}"
        for body, most in ((tiny, 1 << 18), (fields, 1 << 19)):
            refused = await client.post("/generate", content=body)
            assert refused.status_code == 400 and str(most) in refused.text
