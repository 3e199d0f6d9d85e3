"""OpenAI's API, by its own client where that is possible."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from router.api.openai_bodies import ChatBody
from router.config import HttpOptions
from router.text.served_model import ServedModel
from shared.errors import RequestError
from shared.protocol.messages import Decode, Prefill
from tests.unit.router.bodies import prompts_of
from tests.unit.router.fake_node import byte_level_tokenizer, one_then_nothing
from tests.unit.router.fakes import events, joined_pair, openai_client, write_model
from tests.unit.router.test_generate_api import story

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me a story"}]


async def test_chat(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (nodes, _, http):
        async with openai_client(http.base_url) as client:
            answer = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0, seed=5, n=2
            )
        assert [choice.message.content for choice in answer.choices] == [story(9)] * 2
        assert answer.choices[0].finish_reason == "length"
        assert answer.object == "chat.completion" and answer.model == "tiny"
        sent = nodes[0].all(Prefill)
        prompt = "<|system|>be brief<|user|>tell me a story<|assistant|>"
        assert list(sent[0].work.input_ids) == byte_level_tokenizer().encode(prompt).ids
        assert sorted(s.work.params.seed for s in sent) == [5, 6]
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens == len(sent[0].work.input_ids)
        assert usage.completion_tokens == 18 and usage.prompt_tokens_details.cached_tokens == 2
        assert usage.total_tokens == usage.prompt_tokens + 18


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(model_folder: Path, include_usage: bool, continuous: bool) -> None:
    async with joined_pair(model_folder) as (_, _, http):
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 12,
            "stream": True,
            "stream_options": {"include_usage": include_usage, "continuous_usage_stats": continuous},
            "stop": "fox",
        }
        *chunks, done = events((await http.post("/v1/chat/completions", json=body)).text)
        assert done == "[DONE]"
        assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - include_usage) + [
            True
        ] * include_usage
        if include_usage:
            assert chunks.pop()["usage"]["completion_tokens"] > 0
        so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
        assert len(so_far) == len(chunks) * continuous and so_far == sorted(so_far)
        opening = {"role": "assistant", "content": "", "refusal": None}
        assert chunks[0]["choices"][0]["delta"] == opening
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "The quick brown "
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["matched_stop"]) == ("stop", "fox")
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_prompts(model_folder: Path, stream: bool) -> None:
    prompts = (("hi", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2))
    async with joined_pair(model_folder) as (_, _, http):
        for prompt, num_prompts in prompts:
            body = {"prompt": prompt, "n": 2, "max_tokens": 5, "stream": stream}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200
            texts = dict.fromkeys(range(2 * num_prompts), "")
            for part in events(response.text)[:-1] if stream else [response.json()]:
                for choice in part["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == dict.fromkeys(range(2 * num_prompts), story(5))


@pytest.mark.parametrize("rid", [None, "mine"])
async def test_abort_by_the_id_of_the_reply(model_folder: Path, rid: str | None) -> None:
    async with joined_pair(model_folder, decode=one_then_nothing) as (nodes, _, http):
        body = {"prompt": ["a", "b"], "stream": True, "rid": rid, "extra_key": "tenant"}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line async for line in response.aiter_lines() if line)
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["id"] == rid or rid is None
            await nodes[1].wait_for(Decode, 2)
            aborted = await http.post("/abort_request", json={"rid": first["id"]})
            assert aborted.json()["aborted"] == 2
            *_, last, done = [line async for line in lines]
        assert done == "data: [DONE]" and '"finish_reason":"abort"' in last
        assert {sent.work.extra_key for sent in nodes[1].all(Decode)} == {"tenant"}


async def test_models(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, http), openai_client(http.base_url) as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).max_model_len == 256  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("gpt-9")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-9", prompt="hi")


async def test_chat_templates(tmp_path: Path) -> None:
    async def prompt(template: Path | None = None) -> str:
        model = ServedModel.load("tiny", folder, HttpOptions(chat_template=template))
        (prompt,) = await prompts_of(model, ChatBody, {"messages": MESSAGES})
        return byte_level_tokenizer().decode(list(prompt.work.input_ids))

    folder, override = write_model(tmp_path / "plain", chat_template=None), tmp_path / "override.jinja"
    with pytest.raises(RequestError, match="--chat-template"):
        await prompt()
    override.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}")
    assert await prompt(override) == "[be brief][tell me a story]"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message please') }}")
    with pytest.raises(RequestError, match="no system message please"):
        await prompt()
