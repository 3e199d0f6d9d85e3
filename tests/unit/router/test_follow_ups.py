"""Where a prompt goes whose beginning a decode node holds."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from router.dispatch.node import ASK_AFTER_PONGS
from router.http.config import DispatchOptions
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import (
    CacheEvents,
    CacheResync,
    Decode,
    Failed,
    Prefill,
    ReqKey,
    Role,
    TokenEntry,
    Tokens,
)
from tests.unit.router.fake_node import LAYOUT, FakeNode
from tests.unit.router.fakes import joined_pair, joined_router, until_loads

SIZE = LAYOUT.page_size
IDS = [3 + i % 50 for i in range(5 * SIZE)]
SHORT = DispatchOptions(local_prefill_tokens=SIZE)


async def holds(client: httpx.AsyncClient, node: FakeNode, num_pages: int) -> None:
    blocks = tuple(block_hashes(IDS[: num_pages * SIZE], SIZE))
    node.send(CacheEvents(0, blocks, (), reset=True))
    await until_loads(client, node)


async def ask(client: httpx.AsyncClient, **fields: object) -> list[int]:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}, **fields}
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["output_ids"]
    return tokens


async def test_a_short_suffix_is_prefilled_where_the_prefix_is(model_folder: Path) -> None:
    async with joined_pair(model_folder, dispatch=SHORT) as ((prefill, decode), _, client):
        for num_pages in (3, 4):  # the last page is computed in any case, so 5 pages are no more than 4
            await holds(client, decode, num_pages)
            await ask(client)
        with_prefill, alone = decode.all(Decode)
        assert (with_prefill.prefill, with_prefill.local_prefill_limit) == (prefill.ref, None)
        assert (alone.prefill, alone.local_prefill_limit) == (None, SIZE)
        assert len(prefill.all(Prefill)) == 1
        await ask(client, extra_key="tenant")
        assert decode.all(Decode)[2].prefill == prefill.ref, "another tenant's prefix"


async def test_what_an_earlier_connection_left_does_not_disturb_the_greeting(model_folder: Path) -> None:
    """A node knows a router by name: what it said to the connection before may come over this one."""
    key = ReqKey("router", "1")
    left = [CacheEvents(7, (1, 2), (3,)), Tokens((TokenEntry(key, 0, (1,)),)), Failed(key, 503, "gone")]

    async with FakeNode(Role.DECODE) as decode:
        decode.before_hello = list(left)
        async with joined_router(model_folder, [decode]) as (_, client):
            await ask(client)
            assert len(decode.identities) == 1, "the first dial was the only one"


@pytest.mark.parametrize("what", ["the first answer", "the last event"])
async def test_what_was_lost_is_noticed_though_nothing_follows(model_folder: Path, what: str) -> None:
    async with joined_pair(model_folder, dispatch=SHORT) as ((_, decode), _, client):
        if what == "the last event":
            await holds(client, decode, 4)
        decode.cache_seq = 1
        for _ in range(ASK_AFTER_PONGS):
            await until_loads(client, decode)
        await decode.wait_for(CacheResync)
        blocks = tuple(block_hashes(IDS[: 4 * SIZE], SIZE))
        decode.send(CacheEvents(1, blocks, (), reset=True))
        for _ in range(3 * ASK_AFTER_PONGS):
            await until_loads(client, decode)
        await ask(client)
        assert decode.all(Decode)[0].prefill is None
        assert len(decode.all(CacheResync)) == 1


async def test_missing_events_are_asked_for(model_folder: Path) -> None:
    async with joined_pair(model_folder, dispatch=SHORT) as ((prefill, decode), _, client):
        await holds(client, decode, 4)
        decode.send(CacheEvents(2, (5,), ()))
        await decode.wait_for(CacheResync)
        await until_loads(client, decode)
        await ask(client)
        assert decode.all(Decode)[0].prefill == prefill.ref, "nothing is known until all has come"
        await holds(client, decode, 4)
        await ask(client)
        assert decode.all(Decode)[1].prefill is None
