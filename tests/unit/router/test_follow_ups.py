"""Where a prompt goes whose beginning a decode node holds."""

from __future__ import annotations

import asyncio
import contextlib
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
    Finish,
    Load,
    NotCached,
    Prefill,
    ReqKey,
    Role,
    TokenEntry,
    Tokens,
)
from tests.unit.router.fakes import (
    LAYOUT,
    FakeNode,
    joined_pair,
    joined_router,
    pair,
    say_nothing,
    tell_story,
    until_loads,
)
from tests.unit.router.scoring import entry

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


async def test_the_decode_node_that_holds_most_is_chosen_unless_it_is_much_busier(model_folder: Path) -> None:
    async with (
        FakeNode(Role.PREFILL) as prefill,
        FakeNode(Role.DECODE, "d0") as one,
        FakeNode(Role.DECODE, "d1") as two,
        joined_router(model_folder, [prefill, one, two], dispatch=SHORT) as (_, client),
    ):
        await holds(client, one, 1)
        await holds(client, two, 4)
        for _ in range(3):
            await ask(client)
        assert (len(one.all(Decode)), len(two.all(Decode))) == (0, 3)
        two.load = Load(num_running=1000)
        await until_loads(client, two)
        for _ in range(2):
            await ask(client)
        assert len(one.all(Decode)) > 0


async def test_a_node_that_has_lost_the_prefix_gets_it_from_a_prefill_node(model_folder: Path) -> None:
    async def not_cached_once(node: FakeNode, message: Prefill | Decode) -> None:
        assert isinstance(message, Decode)
        if message.local_prefill_limit is not None:
            node.send(NotCached(message.key))
            node.tokens(message.key, 0, [1])  # of the attempt that is given up: nobody's
        else:
            await tell_story(node, message)

    async with (
        pair(decode=not_cached_once) as (prefill, decode),
        joined_router(model_folder, [prefill, decode], dispatch=SHORT) as (_, client),
    ):
        await holds(client, decode, 4)
        assert await ask(client) == decode.story[:4]
        first, second = decode.all(Decode)
        assert (first.key.attempt, first.prefill) == (0, None)
        assert (second.key.attempt, second.prefill, second.local_prefill_limit) == (1, prefill.ref, None)
        assert prefill.all(Prefill)[0].key == second.key
        assert second.key.rid == first.key.rid


async def test_without_a_prefill_node_there_is_no_limit(model_folder: Path) -> None:
    async with FakeNode(Role.DECODE) as decode:

        async def not_cached_once(node: FakeNode, message: Prefill | Decode) -> None:
            assert isinstance(message, Decode)
            assert message.local_prefill_limit is None
            await tell_story(node, message)

        decode.script = not_cached_once
        async with joined_router(model_folder, [decode], dispatch=SHORT) as (_, client):
            await holds(client, decode, 4)
            assert await ask(client) == decode.story[:4]


async def test_a_burst_is_shared_by_those_that_hold_the_same(model_folder: Path) -> None:
    """No node answers before all requests are sent, so no load tells the router what it has just sent."""
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(FakeNode(Role.PREFILL))
        decodes = [await stack.enter_async_context(FakeNode(Role.DECODE, f"d{i}")) for i in range(4)]
        all_sent = asyncio.Event()

        async def tell_when_all_are_sent(node: FakeNode, message: Prefill | Decode) -> None:
            if sum(len(node.all(Decode)) for node in decodes) == 40:
                all_sent.set()
            await all_sent.wait()
            await tell_story(node, message)

        for node in decodes:
            node.script = tell_when_all_are_sent
        joined = joined_router(model_folder, [prefill, *decodes], dispatch=SHORT)
        _, client = await stack.enter_async_context(joined)
        for node in decodes:
            await holds(client, node, 4)
        await asyncio.gather(*(ask(client) for _ in range(40)))
        assert [len(node.all(Decode)) for node in decodes] == [10] * 4


async def test_a_prompt_that_is_scored_is_not_sent_to_who_would_decline(model_folder: Path) -> None:
    async def scored(node: FakeNode, message: Prefill | Decode) -> None:
        node.send(Tokens((entry(node, message, 0, Finish("length")),)))

    async with (
        pair(prefill=say_nothing, decode=scored) as (prefill, decode),
        joined_router(model_folder, [prefill, decode], dispatch=SHORT) as (_, client),
    ):
        await holds(client, decode, 5)
        for start_len, alone in ((0, False), (3 * SIZE, False), (4 * SIZE, True), (-1, True)):
            await ask(client, return_logprob=True, logprob_start_len=start_len)
            assert (decode.all(Decode)[-1].prefill is None) == alone, start_len


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
