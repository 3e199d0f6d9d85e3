"""Several tokens in one entry, as nodes send them after a jump: nothing of the answer depends on how they are cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.protocol.messages import Cancel, Decode, Finish, Prefill, Stop
from tests.unit.router.fake_node import STORY, FakeNode, Script, byte_level_tokenizer
from tests.unit.router.fakes import joined_pair

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


@pytest.mark.parametrize("size", [1, 7, 50])
async def test_a_stop_string_in_the_middle_of_an_entry_ends_it_there(model_folder: Path, size: int) -> None:
    async with joined_pair(model_folder, **in_entries_of(size)) as (_, _, client):
        params = {"max_new_tokens": 100, "stop": "fox jumps"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        assert answer["text"] == "The quick brown "
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fox jumps"}
        ids = answer["output_ids"]
        assert ids == TOLD[: len(ids)] and "fox jumps" in byte_level_tokenizer().decode(ids)
        before = byte_level_tokenizer().decode(ids[:-1])
        assert "fox jumps" not in before, "no token behind the one that completes the stop string"


async def test_the_node_is_told_to_stop_where_the_text_ended(model_folder: Path) -> None:
    async def endless(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, TOLD[:20])

    scripts = {**in_entries_of(1), "decode": endless}
    async with joined_pair(model_folder, **scripts) as ((_, decode), _, client):
        params = {"max_new_tokens": 100, "stop": "quick"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": params})).json()
        stop = await decode.wait_for(Stop)
        assert stop.position == len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]
        assert not decode.all(Cancel)
