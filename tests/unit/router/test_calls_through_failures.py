"""A node that dies or is drained in the middle of reasoning or of a call changes nothing for the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.protocol.messages import Decode, Finish, NodeLimits, Prefill, Role
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import joined_router, openai_client, write_model
from tests.unit.router.test_chat_tools import ARGUMENTS, AUTO, HERMES, QUESTION, TOOLS

IDS = byte_level_tokenizer().encode(AUTO).ids
LIMITS = NodeLimits(context_length=1024, max_total_num_tokens=4096, max_running_requests=8)


def place(text: str) -> int:
    """How many tokens there are when the answer is so far."""
    return len(byte_level_tokenizer().encode(AUTO[: AUTO.index(text)]).ids)


@pytest.mark.parametrize(
    ("leaves_at", "burst", "how"),
    [
        ("hm", 1, "dies"),
        ("\n</think>", 4, "drains"),
        ("I look", 1, "drains"),
        ("_call>\n", 1, "dies"),
        ('me": "weather', 4, "dies"),
        ("city", 1, "drains"),
        ("rich", 4, "drains"),
        ("{}", 4, "dies"),
    ],
)
async def test_a_node_that_leaves_in_the_middle(tmp_path: Path, leaves_at: str, burst: int, how: str) -> None:
    async def first(node: FakeNode, message: Prefill | Decode) -> None:
        position = len(message.work.output_ids)
        node.tokens(message.key, position, IDS[position : position + 1])

    async def rest(node: FakeNode, message: Prefill | Decode) -> None:
        """Tell what is left, some tokens at a time; whoever begins it leaves on the way."""
        begin = len(message.work.output_ids)
        end = place(leaves_at) if not begin else len(IDS)
        for position in range(begin, end, burst):
            await asyncio.sleep(0.001)
            ids = IDS[position : min(position + burst, end)]
            finish = Finish("stop") if position + len(ids) == len(IDS) else None
            node.tokens(message.key, position, ids, finish)
        if not begin:
            await asyncio.sleep(0.05)
            if how == "drains":
                node.drain()
            else:
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(node.stop()))

    folder = write_model(tmp_path / "model", chat_template=HERMES)
    async with (
        FakeNode(Role.PREFILL, script=first, limits=LIMITS) as prefill,
        FakeNode(Role.DECODE, "decode-0", script=rest, limits=LIMITS) as one,
        FakeNode(Role.DECODE, "decode-1", script=rest, limits=LIMITS) as other,
        joined_router(folder, [prefill, one, other]) as (_, http),
        openai_client(http.base_url) as client,
    ):
        asked: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "stream": True}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert len(one.all(Decode)) == len(other.all(Decode)) == 1, "it went on elsewhere"
        deltas = [chunk.choices[0].delta for chunk in chunks]
        extra = [delta.model_extra or {} for delta in deltas]
        assert "".join(fields.get("reasoning_content", "") for fields in extra) == "hm"
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
        assert [call.id for call in calls if call.id] == [calls[0].id]
        told = "".join(call.function.arguments or "" for call in calls if call.function)
        assert json.loads(told) == json.loads(ARGUMENTS)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
