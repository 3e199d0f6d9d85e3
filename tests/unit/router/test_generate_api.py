"""POST /generate against scripted nodes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from shared.protocol.messages import Cancel, Decode, Finish, Prefill, Stop
from tests.unit.router.fake_node import LIMITS, STORY, FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import events, joined_pair, until_queued
from tests.unit.router.scoring import scored_first_token, scored_story


def story(num_tokens: int) -> str:
    tokenizer = byte_level_tokenizer()
    return tokenizer.decode((tokenizer.encode(STORY).ids * 3)[:num_tokens])


async def test_one_answer(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        response = await client.post(
            "/generate",
            json={"text": "once upon a time", "sampling_params": {"max_new_tokens": 12, "sampling_seed": 7}},
        )
        assert response.status_code == 200
        answer = response.json()
        assert answer["text"] == story(12)
        assert answer["output_ids"] == prefill.story[:12]
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert meta["completion_tokens"] == 12
        assert meta["cached_tokens"] == 2
        assert meta["e2e_latency"] > 0
        sent_p, sent_d = prefill.all(Prefill)[0], decode.all(Decode)[0]
        assert sent_p.decode == decode.ref and sent_d.prefill == prefill.ref
        assert sent_p.key == sent_d.key and sent_p.work.input_ids == sent_d.work.input_ids
        assert sent_p.work.params == sent_d.work.params and sent_p.work.params.seed == 7
        assert len(sent_p.work.input_ids) == meta["prompt_tokens"]
        assert not prefill.all(Cancel) and not decode.all(Cancel)


async def test_stream_is_cumulative(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.delay_s = 0.002
        response = await client.post(
            "/generate", json={"text": "x" * 40, "stream": True, "sampling_params": {"max_new_tokens": 60}}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        *seen, done = events(response.text)
        assert done == "[DONE]" and len(seen) > 5
        for earlier, later in itertools.pairwise(seen):
            assert later["text"].startswith(earlier["text"])
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
            assert earlier["meta_info"]["finish_reason"] is None
        assert seen[-1]["text"] == story(60)
        assert seen[-1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_batch_and_choices_are_grouped_by_prompt(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        body = {
            "input_ids": [[1, 2, 3], [4, 5, 6, 7]],
            "sampling_params": [
                {"n": 2, "max_new_tokens": 3, "sampling_seed": 10},
                {"max_new_tokens": 2, "sampling_seed": 99},
            ],
            "rid": ["first", "second"],
        }
        answers = (await client.post("/generate", json=body)).json()
        assert [a["meta_info"]["id"] for a in answers] == ["first", "first", "second"]
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [3, 3, 4]
        assert [a["meta_info"]["completion_tokens"] for a in answers] == [3, 3, 2]
        assert sorted(d.work.params.seed for d in decode.all(Decode)) == [10, 11, 99]
        one = (await client.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 1}})).json()
        assert len(one) == 2
        listed = await client.post(
            "/generate", json={"text": ["a"], "sampling_params": {"max_new_tokens": 1}}
        )
        assert len(listed.json()) == 1


@pytest.mark.parametrize("keep", [False, True])
async def test_the_stop_token_is_an_id_but_not_text(model_folder: Path, keep: bool) -> None:
    async def stop_early(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:3])
        node.tokens(message.key, 3, [node.story[3]], Finish("stop", node.story[3]))

    async with joined_pair(model_folder, decode=stop_early) as ((prefill, _), _, client):
        params = {"stop_token_ids": [prefill.story[3]], "no_stop_trim": keep}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        assert answer["text"] == story(4 if keep else 3)
        assert answer["output_ids"] == prefill.story[:4]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": prefill.story[3]}


async def test_too_long_is_400_and_too_much_is_clipped(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        room = LIMITS.max_total_num_tokens
        full = await client.post("/generate", json={"input_ids": [1] * room})
        assert full.status_code == 400
        assert str(room) in full.json()["error"]["message"]
        clipped = await client.post(
            "/generate", json={"input_ids": [1] * (room - 3), "sampling_params": {"max_new_tokens": 10**30}}
        )
        assert clipped.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert decode.all(Decode)[0].work.params.max_new_tokens == 3
        last = await client.post("/generate", json={"input_ids": [1] * (room - 1)})
        assert last.json()["meta_info"]["completion_tokens"] == 1
        assert len(decode.all(Decode)) == 1  # one token is the prefill node's alone
        scored = await client.post(
            "/generate", json={"input_ids": [1] * room, "sampling_params": {"max_new_tokens": 0}}
        )
        assert scored.status_code == 200


async def test_abort_keeps_what_was_generated(model_folder: Path) -> None:
    async def three(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:3])

    async with joined_pair(model_folder, decode=three) as ((_, decode), _, client):

        async def num_aborted(**what: object) -> int:
            answer = await client.post("/abort_request", json=what)
            assert answer.status_code == 200
            return int(answer.json()["aborted"])

        assert await num_aborted(rid="nobody") == 0
        assert (await client.post("/abort_request", json={"rid": ""})).status_code == 400
        body = {"text": ["a", "b"], "rid": ["_x", "y"], "sampling_params": {"n": 2}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        await decode.wait_for(Decode, 4)
        await until_queued(client, 0)
        assert await num_aborted(rid="y") == await num_aborted(rid="", abort_all=True) == 2
        answers = (await asked).json()
        assert [answer["output_ids"] for answer in answers] == [decode.story[:3]] * 4
        for reason in (answer["meta_info"]["finish_reason"] for answer in answers):
            assert reason["type"] == "abort" and reason["message"] and reason["status_code"] == 499
        await decode.wait_for(Cancel, 4)


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


async def test_a_stop_string_in_the_middle_of_an_entry_ends_it_there_and_at_the_node(
    model_folder: Path,
) -> None:
    async def endless(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:20])

    async with joined_pair(model_folder, decode=endless) as ((_, decode), _, client):
        params = {"max_new_tokens": 100, "stop": "fox jumps"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        assert answer["text"] == "The quick brown "
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fox jumps"}
        ids = answer["output_ids"]
        assert ids == decode.story[: len(ids)] and "fox jumps" in byte_level_tokenizer().decode(ids)
        assert "fox jumps" not in byte_level_tokenizer().decode(ids[:-1]), "no token behind it"
        stop = await decode.wait_for(Stop)
        assert stop.position == len(ids) == answer["meta_info"]["completion_tokens"]
        assert not decode.all(Cancel)
