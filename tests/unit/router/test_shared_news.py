"""Two routers that know nothing of each other, over nodes that they share: aborts, added and removed nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.nodes.shared_news import MAX_ABORTS_A_SECOND, MAX_AHEAD_S, MAX_REMEMBERED, SharedNews
from router.server import Router
from shared.protocol.messages import AbortedReqs, AddedNode, Decode, Relay, RemovedNode, Role, RouterNews
from shared.timeline import Clock
from tests.unit.router.fakes import (
    FakeNode,
    joined_router,
    one_then_nothing,
    pair,
    states,
    until_states,
    wait_before_story,
)

Served = tuple[Router, httpx.AsyncClient]
BODY = {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 8}}


@contextlib.asynccontextmanager
async def two_routers(folder: Path, nodes: list[FakeNode]) -> AsyncIterator[tuple[Served, Served]]:
    async with joined_router(folder, nodes) as one, joined_router(folder, nodes) as other:
        yield one, other


async def test_an_abort_by_rid_reaches_the_other_router(model_folder: Path) -> None:
    async with (
        pair(decode=one_then_nothing) as (prefill, decode),
        two_routers(model_folder, [prefill, decode]) as ((_, one), (_, other)),
    ):
        asked = [
            asyncio.create_task(client.post("/generate", json={"text": "a", "rid": rid}))
            for client, rid in ((one, "mine"), (other, "theirs"), (other, "spared"))
        ]
        await decode.wait_for(Decode, 3)
        told = await one.post("/abort_request", json={"rid": "theirs"})
        assert told.json() == {"success": True, "aborted": 0, "relayed": True}, "of the router asked"
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


class Node:
    """A live node to which routers send relays."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []

    def send(self, relay: Relay) -> None:
        self.relays.append(relay)

    @property
    def addresses(self) -> list[str]:
        return [relay.news.address for relay in self.relays if not isinstance(relay.news, AbortedReqs)]


def news_of(node: Node, clock: Clock = lambda: 100.0) -> SharedNews:
    return SharedNews(lambda: [node], "one", clock)  # type: ignore[list-item]


def added(address: str, at: float = 100.0) -> AddedNode:
    return AddedNode(Role.DECODE, address, "d#1", at)


def removed(address: str, at: float = 100.0) -> RemovedNode:
    return RemovedNode(address, "d#1", 0.0, at)


@pytest.mark.parametrize("removal_first", [False, True])
def test_of_two_changes_at_the_same_time_the_removal_holds(removal_first: bool) -> None:
    """Whichever comes first, so that all routers come to the same."""
    node = Node()
    news = news_of(node)
    both: list[RouterNews] = [added("a"), removed("a")]
    taken = [news.take(Relay("two", i, one)) for i, one in enumerate(both[::-1] if removal_first else both)]
    assert taken == ([removed("a"), None] if removal_first else both)
    late = Node()
    news.send_current(late)  # type: ignore[arg-type]
    assert late.relays == []


def test_more_aborts_than_are_sent_in_a_second_are_answered_as_not_relayed() -> None:
    times = [100.4] * (MAX_ABORTS_A_SECOND + 1) + [101.0]
    news = news_of(Node(), iter(times).__next__)
    relayed = [news.send_abort("x") for _ in times]
    assert relayed.count(True) == MAX_ABORTS_A_SECOND + 1 and relayed[-1]


def test_a_change_is_later_than_the_one_before_also_when_the_clock_stands_still() -> None:
    news = news_of(Node())
    for at in (100.0, 200.0):  # another router's clock may be ahead
        news.send(added("d", at))
        assert news.next_time("d") > at


def test_a_router_takes_no_news_of_its_own() -> None:
    assert news_of(Node()).take(Relay("one", 1, AbortedReqs("x"))) is None
    assert news_of(Node()).take(Relay("two", 1, AbortedReqs("x"))) == AbortedReqs("x")


@pytest.mark.parametrize(
    ("news", "about"),
    [(AddedNode(Role.DECODE, "tcp://d9:1", "", 1.0), "address=tcp://d9:1"), (AbortedReqs("r7"), "rid=r7")],
)
def test_the_log_says_what_the_news_is_about(
    news: RouterNews, about: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "baton"):
        SharedNews(list, "own").take(Relay("other", 1, news))
    assert about in caplog.text


def test_a_removal_is_passed_on_once_and_sent_again_to_correct_old_news() -> None:
    node = Node()
    news = news_of(node)
    for number, change in enumerate([removed("d"), removed("d"), removed("d", 99.0)]):
        news.take(Relay("two", number, change))
        assert [relay.news for relay in node.relays] == [removed("d")]
    assert news.take(Relay("three", 1, added("d", 99.0))) is None
    assert node.relays[0] == node.relays[1]


@pytest.mark.parametrize("at", [100.0 + MAX_AHEAD_S + 1, 1e10, 1e300, math.inf, math.nan])
def test_a_change_from_far_ahead_does_not_hold_for_ever(at: float, caplog: pytest.LogCaptureFixture) -> None:
    """An operator's later change of the address counts, here and at every other router."""
    news = news_of(Node())
    assert news.take(Relay("liar", 1, removed("d", at))) is None
    assert "news_not_believed" in caplog.text
    assert news.next_time("d") == 100.0
    assert news.take(Relay("two", 1, added("d", 101.0))) == added("d", 101.0)


def test_a_clock_that_is_ahead_is_believed() -> None:
    news = news_of(Node())
    ahead = removed("d", 100.0 + MAX_AHEAD_S - 1)
    assert news.take(Relay("two", 1, ahead)) == ahead
    assert news.next_time("d") > ahead.at


def test_what_is_said_under_the_numbers_of_another_router_takes_no_place() -> None:
    news = news_of(Node())
    for number in range(1, 50):
        news.take(Relay("two", number, AbortedReqs("a lie")))
    for number in range(1, 50):
        assert news.take(Relay("two", number, removed(f"d{number}"))) == removed(f"d{number}")
        assert news.take(Relay("two", number, removed(f"d{number}"))) is None


def test_only_the_latest_changes_are_remembered_and_a_node_that_comes_hears_of_what_is_added() -> None:
    news = news_of(Node())
    for i in range(MAX_REMEMBERED):
        news.send(added(f"d{i}"))
    news.send(removed("d1"))
    news.send(added("d0", 200.0))
    news.send(added("new"))
    node = Node()
    news.send_current(node)  # type: ignore[arg-type]
    latest = [*(f"d{i}" for i in range(3, MAX_REMEMBERED)), "d0", "new"]
    assert node.addresses == latest, "d1 was removed, and d2 is forgotten"


def test_only_the_latest_numbers_are_remembered() -> None:
    news = news_of(Node())
    for number in range(MAX_REMEMBERED + 1):
        assert news.take(Relay("two", number, AbortedReqs("x"))) is not None
    assert news.take(Relay("two", 0, AbortedReqs("x"))) is not None
    assert news.take(Relay("two", 2, AbortedReqs("x"))) is None


async def test_a_drained_node_is_drained_by_all_routers_and_by_those_that_come_later(
    model_folder: Path,
) -> None:
    async with (
        pair() as (prefill, decode),
        FakeNode(Role.DECODE, "decode-1") as second,
        two_routers(model_folder, [prefill, decode, second]) as ((_, one), (_, other)),
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
    async with (
        pair(decode=one_then_nothing) as (prefill, decode),
        two_routers(model_folder, [prefill, decode]) as ((_, one), (_, other)),
    ):
        running = asyncio.create_task(other.post("/generate", json=BODY))
        await decode.wait_for(Decode)
        assert (await one.delete("/fleet/nodes/decode-0?drain_timeout_s=0.2")).status_code == 200
        ended = await running
        assert ended.status_code == 503 and "is drained" in ended.json()["error"]["message"]
        await until_states(other, prefill_0="alive")


async def test_an_added_node_is_added_by_all_routers_and_by_those_that_come_later(model_folder: Path) -> None:
    async with (
        pair() as (prefill, decode),
        FakeNode(Role.DECODE, "decode-1") as added,
        two_routers(model_folder, [prefill, decode]) as ((_, one), (_, other)),
    ):
        address = {"role": "decode", "address": added.address}
        assert (await one.post("/fleet/nodes", json=address)).status_code == 200
        alive = {"prefill_0": "alive", "decode_0": "alive", "decode_1": "alive"}
        await until_states(other, **alive)
        await prefill.stop()
        prefill.start(prefill.port, incarnation="b")  # it knows nothing of what was before
        await until_states(one, **alive)
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
    async with (
        pair(decode=one_then_nothing) as (prefill, decode),
        two_routers(model_folder, [prefill, decode]) as ((_, one), (_, other)),
    ):
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


async def test_a_removed_node_does_not_come_back_by_old_news(model_folder: Path) -> None:
    """Old news of a node that was removed comes from a router that has not heard of the removal."""
    async with (
        pair() as (prefill, decode),
        FakeNode(Role.DECODE, "decode-1") as added,
        FakeNode(Role.PREFILL, "prefill-1") as unknown_to_one,
    ):
        both = [prefill, decode]
        async with (
            joined_router(model_folder, both) as (_, one),
            joined_router(model_folder, [*both, unknown_to_one]) as (_, other),
        ):
            body = {"role": "decode", "address": added.address}
            assert (await one.post("/fleet/nodes", json=body)).status_code == 200
            alive = {"prefill_0": "alive", "decode_0": "alive"}
            await until_states(other, **alive, prefill_1="alive", decode_1="alive")
            stale = next(relay.news for relay in prefill.all(Relay) if isinstance(relay.news, AddedNode))
            assert isinstance(stale, AddedNode)
            unknown_to_one.relay_from("stranger", stale)  # so it will tell routers that come later
            await added.stop()
            assert (await one.delete("/fleet/nodes/decode-1")).status_code == 200
            await until_states(one, **alive)
            await until_states(other, **alive, prefill_1="alive")
            await unknown_to_one.wait_for(Relay)
            for node in (prefill, unknown_to_one):
                node.relay_from("stranger", stale)
            await asyncio.sleep(0.3)
            assert await states(one) == {"prefill-0": "alive", "decode-0": "alive"}
            assert await states(other) == {"prefill-0": "alive", "decode-0": "alive", "prefill-1": "alive"}
            async with joined_router(model_folder, [unknown_to_one], wait=False) as (_, later):
                await until_states(later, prefill_1="alive")
                await asyncio.sleep(0.3)
                assert await states(later) == {"prefill-1": "alive"}, "the node has been corrected"

            # What an operator does later holds, even for the same process.
            added.start(added.port, incarnation="b")
            assert (await other.post("/fleet/nodes", json=body)).status_code == 200
            await until_states(one, **alive, decode_1="alive")


async def test_a_node_that_says_that_it_is_drained_is_not_told_of_as_added(model_folder: Path) -> None:
    async with (
        pair() as (prefill, decode),
        FakeNode(Role.DECODE, "decode-1") as added,
        two_routers(model_folder, [prefill, decode]) as ((_, one), _),
    ):
        body = {"role": "decode", "address": added.address}
        assert (await one.post("/fleet/nodes", json=body)).status_code == 200
        added.drain()
        alive = {"prefill_0": "alive", "decode_0": "alive"}
        await until_states(one, **alive)
        await prefill.stop()
        prefill.heard.clear()
        prefill.start(prefill.port, incarnation="b")
        await until_states(one, **alive)
        await asyncio.sleep(0.2)
        assert not [relay for relay in prefill.all(Relay) if isinstance(relay.news, AddedNode)]
