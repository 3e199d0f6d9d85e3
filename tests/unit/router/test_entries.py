"""Several tokens in one entry, as nodes send them after a jump: nothing of the answer depends on how they are cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.protocol.messages import Cancel, Decode, Finish, Prefill, Stop
from tests.unit.router.fakes import (
    STORY,
    FakeNode,
    Script,
    byte_level_tokenizer,
    events,
    joined_pair,
    joined_router,
    pair,
)

NUM_FIRST = 4
"""Tokens in the entry of position 0, which both nodes send."""
TOLD = byte_level_tokenizer().encode(STORY).ids * 10


def in_entries_of(size: int) -> dict[str, Script]:
    async def first(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, TOLD[:NUM_FIRST])

    async def story(node: FakeNode, message: Prefill | Decode) -> None:
        wanted = message.work.params.max_new_tokens
        node.tokens(message.key, 0, TOLD[:NUM_FIRST])
        for position in range(NUM_FIRST, wanted, size):
            if node.gone(message.key):
                return
            await asyncio.sleep(0.001)
            end = min(position + size, wanted)
            finish = Finish("length") if end == wanted else None
            node.tokens(message.key, position, TOLD[position:end], finish)

    return {"prefill": first, "decode": story}


sizes = pytest.mark.parametrize("size", [1, 7, 50])


@sizes
async def test_each_token_is_forwarded_once(model_folder: Path, size: int) -> None:
    async with joined_pair(model_folder, **in_entries_of(size)) as (_, _, client):
        body = {"text": "tell me", "sampling_params": {"max_new_tokens": 30}, "stream": True}
        *steps, done = events((await client.post("/generate", json=body)).text)
        assert done == "[DONE]"
        assert steps[-1]["output_ids"] == TOLD[:30]  # type: ignore[index]
        assert steps[-1]["text"] == byte_level_tokenizer().decode(TOLD[:30])  # type: ignore[index]
        assert steps[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 30}  # type: ignore[index]
        for step in steps:
            assert steps[-1]["text"].startswith(step["text"])  # type: ignore[index]


@sizes
async def test_a_stop_string_in_the_middle_of_an_entry_ends_it_there(model_folder: Path, size: int) -> None:
    async with joined_pair(model_folder, **in_entries_of(size)) as (_, _, client):
        params = {"max_new_tokens": 100, "stop": "fox jumps"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        assert answer["text"] == "The quick brown "
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fox jumps"}
        text = byte_level_tokenizer().decode(answer["output_ids"])
        assert "fox jumps" in text
        before = byte_level_tokenizer().decode(answer["output_ids"][:-1])
        assert "fox jumps" not in before, "no token behind the one that completes the stop string"
        assert answer["output_ids"] == TOLD[: len(answer["output_ids"])]


async def test_the_node_is_told_to_stop_where_the_text_ended(model_folder: Path) -> None:
    async def endless(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, TOLD[:20])

    async with (
        pair(prefill=in_entries_of(1)["prefill"], decode=endless) as (prefill, decode),
        joined_router(model_folder, [prefill, decode]) as (_, client),
    ):
        params = {"max_new_tokens": 100, "stop": "quick"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        stop = await decode.wait_for(Stop)
        assert stop.position == len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]
        assert not decode.all(Cancel)
