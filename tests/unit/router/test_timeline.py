"""The timeline of a stream grows while it runs: each event tells the stages that are known by then."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.protocol.messages import Decode, Finish, Prefill, ReqReport, Stamp
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import joined_pair

ROUTES = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
}


def stamps(role: str, *stages: str) -> tuple[Stamp, ...]:
    return tuple(Stamp(role, stage, time.time()) for stage in stages)


async def prefill(node: FakeNode, message: Prefill | Decode) -> None:
    report = ReqReport(stamps=stamps("prefill", "queued", "prefilling", "transferring"))
    node.tokens(message.key, 0, node.story[:1], report=report)


def told_of(event: dict[str, Any]) -> dict[str, Any]:
    """Where either dialect puts it."""
    fields = event["meta_info"] if "meta_info" in event else event["choices"][0]
    return {name: fields[name] for name in ("timeline", "kv_pages_transferred", "kv_bytes_transferred")}


async def stream(client: httpx.AsyncClient, path: str, **fields: object) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", path, json={**ROUTES[path], **fields, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", ROUTES)
async def test_each_event_tells_the_stages_known_by_then(model_folder: Path, path: str) -> None:
    first_token_seen = asyncio.Event()

    async def decode(node: FakeNode, message: Prefill | Decode) -> None:
        await first_token_seen.wait()
        arrived = stamps("decode", "queued", "transferring", "decoding")
        node.tokens(message.key, 0, node.story[:1], report=ReqReport(stamps=arrived, kv_pages_transferred=2))
        node.tokens(message.key, 1, node.story[1:2])
        ended = ReqReport(stamps=arrived + stamps("decode", "finished"), kv_pages_transferred=2)
        node.tokens(message.key, 2, node.story[2:3], Finish("length"), ended)

    async with joined_pair(model_folder, prefill=prefill, decode=decode) as (_, _, client):
        told = []
        async for event in stream(client, path, return_timeline=True):
            told.append(told_of(event))
            first_token_seen.set()
        async for event in stream(client, path):  # which did not ask
            fields = event["meta_info"] if "meta_info" in event else event["choices"][0]
            assert not {"timeline", "kv_pages_transferred"} & set(fields)
    seen = [[(stamp["role"], stamp["stage"]) for stamp in each["timeline"]] for each in told]
    assert seen[0] == [
        ("router", "queued"),
        ("prefill", "queued"),
        ("prefill", "prefilling"),
        ("prefill", "transferring"),
    ]
    assert told[0]["kv_pages_transferred"] == 0
    assert seen[-1] == [
        *seen[0],
        *(("decode", stage) for stage in ("queued", "transferring", "decoding", "finished")),
        ("router", "finished"),
    ]
    assert told[-1]["kv_pages_transferred"] == 2
    assert all(set(before) <= set(after) for before, after in itertools.pairwise(seen))
