"""Many streams at once: each complete, all equal, and nothing of them left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from shared.protocol.messages import Role
from tests.patience import eventually
from tests.unit.router.fake_node import STORY, FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import events, joined_router
from tests.unit.router.raw_client import post, raw_client
from tests.unit.router.stepping_node import ROOMY, SteppingNode

NUM_STREAMS = 500
NUM_TOKENS = 20
BATCH = f"X-SMG-Routing-Key: all:{NUM_STREAMS}:0.01\n"
TOKENIZER = byte_level_tokenizer()
TOLD = TOKENIZER.decode((TOKENIZER.encode(STORY).ids * 3)[:NUM_TOKENS])
NATIVE = {"text": "a fox", "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}}
CHAT = {"messages": [{"role": "user", "content": "a fox"}], "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), [("/generate", NATIVE), ("/v1/chat/completions", CHAT)])
@pytest.mark.uvloop
async def test_five_hundred_streams(model_folder: Path, path: str, body: dict[str, object]) -> None:
    """They decode in one batch: every step of the node is one message with a token of each."""
    async with (
        FakeNode(Role.PREFILL, limits=ROOMY) as prefill,
        SteppingNode() as decode,
        joined_router(model_folder, [prefill, decode]) as (router, client),
    ):
        await client.aclose()
        await asyncio.sleep(0.05)
        files, tasks = num_open_files(), len(asyncio.all_tasks())

        async def stream(number: int) -> str:
            async with raw_client(router.http_port) as raw:
                raw.send(post(path, {**body, "stream": True, "rid": f"r{number}"}, headers=BATCH))
                return text_of((await raw.answer()).body)

        for _ in range(2):  # a name or a place that is not given back would be missing the second time
            texts = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
            assert set(texts) == {TOLD}
            await eventually(lambda: num_open_files() <= files and len(asyncio.all_tasks()) <= tasks)
            assert router._dispatcher.num_running == 0


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def text_of(body: bytes) -> str:
    *told, done = events(body.decode())
    assert done == "[DONE]"
    if "text" in told[-1]:
        return told[-1]["text"]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in told)
