"""Two routers that know nothing of each other, over nodes that they share: aborts, added and removed nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.nodes.shared_news import MAX_REMEMBERED, SharedNews
from shared.protocol.messages import AbortedReqs, AddedNode, Decode, Relay, RemovedNode, Role, RouterNews
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import joined_pair, joined_router, states, until_states, wait_before_story

BODY = {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 8}}


@contextlib.asynccontextmanager
async def two_routers(
    folder: Path, *others: FakeNode, **scripts: object
) -> AsyncIterator[tuple[tuple[FakeNode, FakeNode], httpx.AsyncClient, httpx.AsyncClient]]:
    """One node of each role and `others`, and clients of two routers that are joined to them."""
    async with (
        joined_pair(folder, *others, **scripts) as (nodes, _, one),
        joined_router(folder, [*nodes, *others]) as (_, other),
    ):
        yield nodes, one, other


async def test_an_abort_by_rid_reaches_the_other_router(model_folder: Path) -> None:
    async with two_routers(model_folder, decode=one_then_nothing) as ((prefill, decode), one, other):
        asked = [
            asyncio.create_task(client.post("/generate", json={"text": "a", "rid": rid}))
            for client, rid in ((one, "mine"), (other, "theirs"), (other, "spared"))
        ]
        await decode.wait_for(Decode, 3)
        told = await one.post("/abort_request", json={"rid": "theirs"})
        assert told.json() == {"success": True, "aborted": 0}, "of the router asked"
        assert (await asked[1]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert not asked[0].done() and not asked[2].done()
        assert (await one.post("/abort_request", json={"abort_all": True})).json()["aborted"] == 1
        for ended in (asked[0], asked[2]):
            assert (await ended).json()["meta_info"]["finish_reason"]["type"] == "abort"
        for node in (prefill, decode):
            await node.wait_for(Relay, 2)
        relays = decode.all(Relay)
        assert relays == prefill.all(Relay), "through every node"
        assert [relay.news for relay in relays] == [AbortedReqs("theirs"), AbortedReqs(None)]


def test_a_router_takes_no_news_of_its_own() -> None:
    news = SharedNews(list, "one")
    assert news.take(Relay("one", 1, AbortedReqs("x"))) is None
    assert news.take(Relay("two", 1, AbortedReqs("x"))) == AbortedReqs("x")


@pytest.mark.parametrize(
    ("news", "about"),
    [(AddedNode(Role.DECODE, "tcp://d9:1", ""), "address=tcp://d9:1"), (AbortedReqs("r7"), "rid=r7")],
)
def test_the_log_says_what_the_news_is_about(
    news: RouterNews, about: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "baton"):
        SharedNews(list, "own").take(Relay("other", 1, news))
    assert about in caplog.text


def test_what_is_said_under_the_numbers_of_another_router_takes_no_place() -> None:
    news = SharedNews(list, "one")
    for number in range(1, 50):
        news.take(Relay("two", number, AbortedReqs("a lie")))
    for number in range(1, 50):
        removed = RemovedNode(f"d{number}", "d#1", 0.0)
        assert news.take(Relay("two", number, removed)) == removed
        assert news.take(Relay("two", number, removed)) is None


def test_only_the_latest_numbers_are_remembered() -> None:
    news = SharedNews(list, "one")
    for number in range(MAX_REMEMBERED + 1):
        assert news.take(Relay("two", number, AbortedReqs("x"))) is not None
    assert news.take(Relay("two", 0, AbortedReqs("x"))) is not None
    assert news.take(Relay("two", 2, AbortedReqs("x"))) is None


async def test_a_drained_node_is_drained_by_all_routers_and_by_those_that_come_later(
    model_folder: Path,
) -> None:
    async with (
        FakeNode(Role.DECODE, "decode-1") as second,
        two_routers(model_folder, second) as ((prefill, decode), one, other),
    ):
        release = wait_before_story(decode, second)
        running = [asyncio.create_task(other.post("/generate", json=BODY)) for _ in range(2)]
        await decode.wait_for(Decode)
        removed = await one.delete("/fleet/nodes/decode-0?drain_timeout_s=500")
        assert removed.json()["num_failed_over"] == 0
        alive = {"prefill_0": "alive", "decode_1": "alive"}
        await until_states(one, **alive)
        await until_states(other, **alive, decode_0="draining")  # what it has goes on
        assert [node["state"] for node in (await other.get("/health")).json()["decode"]].count(
            "draining"
        ) == 1
        release.set()
        assert [(await each).status_code for each in running] == [200, 200]
        await until_states(other, **alive)

        nodes = [prefill, decode, second]
        async with joined_router(model_folder, nodes, wait=False) as (_, later):
            await until_states(later, **alive)
            for _ in range(2):
                assert (await later.post("/generate", json=BODY)).status_code == 200
        assert len(decode.all(Decode)) == 1
        # Added anew, it takes work again, from all.
        added = await one.post("/fleet/nodes", json={"role": "decode", "address": decode.address})
        assert added.json()["node"]["state"] == "alive"
        await until_states(other, **alive, decode_0="alive")


async def test_the_time_of_a_drain_is_the_same_everywhere(model_folder: Path) -> None:
    async with two_routers(model_folder, decode=one_then_nothing) as ((_, decode), one, other):
        running = asyncio.create_task(other.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        assert (await one.delete("/fleet/nodes/decode-0?drain_timeout_s=0.2")).status_code == 200
        ended = await running
        assert ended.status_code == 503 and "is drained" in ended.json()["error"]["message"]
        await until_states(other, prefill_0="alive")


async def test_an_added_node_is_added_by_all_routers_and_by_those_that_come_later(model_folder: Path) -> None:
    async with (
        FakeNode(Role.DECODE, "decode-1") as added,
        two_routers(model_folder) as ((prefill, _), one, other),
    ):
        address = {"role": "decode", "address": added.address}
        assert (await one.post("/fleet/nodes", json=address)).status_code == 200
        alive = {"prefill_0": "alive", "decode_0": "alive", "decode_1": "alive"}
        await until_states(other, **alive)
        async with joined_router(model_folder, [prefill], wait=False) as (_, later):
            await until_states(later, prefill_0="alive", decode_1="alive")
            await added.stop()
            removed = await one.delete("/fleet/nodes/decode-1")  # dead as it is
            assert removed.status_code == 200
            for client, left in ((other, {"decode_0": "alive"}), (later, {})):
                await until_states(client, prefill_0="alive", **left)
        async with joined_router(model_folder, [prefill], wait=False) as (_, latest):
            await until_states(latest, prefill_0="alive")
            await asyncio.sleep(0.2)
            assert await states(latest) == {"prefill-0": "alive"}


async def test_a_node_that_is_added_again_stays_where_it_is_still_drained(model_folder: Path) -> None:
    async with two_routers(model_folder, decode=one_then_nothing) as ((_, decode), one, other):
        running = asyncio.create_task(other.post("/generate", json={**BODY, "rid": "long"}))
        await decode.wait_for(Decode)
        removing = asyncio.create_task(other.delete("/fleet/nodes/decode-0?drain_timeout_s=500"))
        await until_states(one, prefill_0="alive")
        await until_states(other, prefill_0="alive", decode_0="draining")
        added = await one.post("/fleet/nodes", json={"role": "decode", "address": decode.address})
        assert added.status_code == 200
        await until_states(other, prefill_0="alive", decode_0="alive")
        refused = await removing
        assert refused.status_code == 409 and "it was added again" in refused.json()["error"]["message"]
        await other.post("/abort_request", json={"rid": "long"})
        assert (await running).status_code == 200
        await asyncio.sleep(0.3)  # the drain would have ended
        assert await states(other) == {"prefill-0": "alive", "decode-0": "alive"}
        asked = asyncio.create_task(other.post("/generate", json={**BODY, "rid": "next"}))
        await decode.wait_for(Decode, 2)
        await other.post("/abort_request", json={"rid": "next"})
        assert (await asked).status_code == 200
