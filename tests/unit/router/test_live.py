"""`/live`: what nodes and this router do now, second by second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from router.api.live_state import LiveEvent, NodeNow, links_words
from shared.protocol.messages import LinkReport, Load, Loading, Role
from tests.patience import eventually
from tests.unit.router.fake_node import FakeNode, one_then_nothing
from tests.unit.router.fakes import joined_pair, joined_router, new_client, pair, until_sampled, write_model


async def feed(client: httpx.AsyncClient) -> AsyncIterator[LiveEvent]:
    async with client.stream("GET", "/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield msgspec.json.decode(line.removeprefix("data: "), type=LiveEvent)


async def state(client: httpx.AsyncClient) -> LiveEvent:
    return msgspec.json.decode((await client.get("/live/state")).content, type=LiveEvent)


async def node_with(client: httpx.AsyncClient, name: str, **wanted: object) -> NodeNow:
    """The node, as soon as it is told with these values."""

    async def found() -> NodeNow | None:
        for node in (await state(client)).nodes:
            if node.node_id == name and all(getattr(node, k) == v for k, v in wanted.items()):
                return node
        return None

    return await eventually(found)


async def test_the_first_event_has_all_samples_and_later_ones_what_is_new(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        await until_sampled(client)
        seen = []
        async for event in feed(client):
            seen.append(event.samples)
            if len(seen) == 2:
                break
        assert len(seen[0]) >= 1
        assert len(seen[1]) >= 1
        assert seen[1][0].time > seen[0][-1].time
        assert (await state(client)).samples[: len(seen[0])] == seen[0]


async def test_traffic_becomes_samples(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        body = {"prompt": "tell me", "max_tokens": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        async for event in feed(client):
            busy = [sample for sample in event.samples if sample.tokens_per_s]
            if busy:
                break
        sample = busy[-1]
        assert 0 < sample.tokens_per_s <= 20 * 1.1
        assert sample.ttft_s is not None and sample.itl_s is not None
        for percentiles in (sample.ttft_s, sample.itl_s):
            assert len(percentiles) == 3 and list(percentiles) == sorted(percentiles)
        assert (sample.num_running_reqs, sample.num_queue_reqs) == (0, 0)


async def test_requests_wait_until_their_first_token(model_folder: Path) -> None:
    async with (
        pair(prefill=one_then_nothing, decode=one_then_nothing) as (prefill, decode),
        joined_router(model_folder, [prefill, decode]) as (_, client),
    ):
        told = asyncio.Event()

        async def first_token_later(node: FakeNode, work: object) -> None:
            await told.wait()
            await one_then_nothing(node, work)  # type: ignore[arg-type]

        prefill.script = decode.script = first_token_later
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        async for event in feed(client):
            counts = [(s.num_running_reqs, s.num_queue_reqs) for s in event.samples]
            if (0, 1) in counts:
                told.set()
            if (1, 0) in counts:
                break
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_nodes_are_told_as_their_pongs_say(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        decode.load = Load(
            num_running=3,
            num_waiting=2,
            num_transferring=1,
            num_bootstrapping=4,
            num_pages=100,
            num_free_pages=50,
            num_evictable_pages=30,
            num_held_pages=20,
            num_links=1,
            links=(LinkReport("prefill-0#1", True, "shm"),),
        )
        node = await node_with(client, "decode-0", num_running_reqs=3)
        assert (node.role, node.state, node.reason) == ("decode", "live", "")
        assert (node.num_queue_reqs, node.num_transferring_reqs, node.num_bootstrapping_reqs) == (2, 1, 4)
        pages = (node.num_pages, node.num_free_pages, node.num_cached_pages, node.num_held_pages)
        assert pages == (100, 50, 30, 20)
        assert (node.num_links, node.links) == (1, {"shm": 1})
        assert node.links_words == ["1 shm"]
        assert [n.node_id for n in (await state(client)).nodes] == ["prefill-0", "decode-0"]


async def test_rates_are_how_fast_counters_grow(model_folder: Path) -> None:
    async with FakeNode(Role.DECODE) as decode:
        decode.load = Load(num_generated_tokens=1_000_000, kv_bytes_transferred=10**12, num_pages=1)
        async with joined_router(model_folder, [decode]) as (_, client):
            async for event in feed(client):
                (node,) = event.nodes
                assert (node.tokens_per_s, node.kv_bytes_per_s) == (0, 0), "that was before"
                if node.num_pages and event.samples:
                    break
            decode.load = Load(
                num_generated_tokens=1_000_500,
                num_prompt_tokens=300,
                num_cached_tokens=50,
                kv_bytes_transferred=10**12 + 8000,
            )
            async for event in feed(client):
                (node,) = event.nodes
                if node.tokens_per_s:
                    break
            assert 0 < node.tokens_per_s < 1_000_000, "what was before is not in it"
            assert node.kv_bytes_per_s == pytest.approx(16 * node.tokens_per_s, rel=0.001)
            assert node.prompt_tokens_per_s == pytest.approx(node.tokens_per_s / 2, rel=0.001)
            assert event.samples[-1].decode.tokens_per_s == node.tokens_per_s


async def test_a_node_that_goes_down_says_why(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        await node_with(client, "decode-0", state="live")
        await decode.stop()
        gone = await node_with(client, "decode-0", state="gone")
        assert gone.reason and gone.num_pages == 0
        event = await state(client)
        assert event.router.status == "unavailable" and "decode-0" in event.router.reason


async def test_a_node_that_loads_is_told_with_its_progress(model_folder: Path) -> None:
    async with FakeNode(Role.DECODE) as decode, joined_router(model_folder, [decode]) as (router, client):
        router.membership.on_announcement(Loading("prefill-7", Role.PREFILL, "weights", 0.25))
        node = await node_with(client, "prefill-7", state="loading")
        assert (node.role, node.reason, node.loaded) == ("prefill", "weights", 0.25)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
async def test_the_router_says_whether_it_can_chat(tmp_path: Path, template: str | None) -> None:
    folder = write_model(tmp_path, chat_template=template)
    async with joined_pair(folder) as (_, _, client):
        router = (await state(client)).router
        assert router.has_chat_template is (template is not None)
        assert (router.status, router.model, router.context_length) == ("ok", "tiny", 256)


async def test_a_feed_ends_when_the_router_stops(model_folder: Path) -> None:
    async with pair() as nodes:
        async with joined_router(model_folder, list(nodes)) as (router, _):
            url = router.url
            begun = asyncio.Event()
            watching = asyncio.create_task(_lines_of_feed(url, begun))
            await begun.wait()
        assert (await watching)[-2:] == ["data: [DONE]", ""]


async def _lines_of_feed(url: str, begun: asyncio.Event) -> list[str]:
    lines = []
    async with new_client() as client, client.stream("GET", f"{url}/live") as feed:
        async for line in feed.aiter_lines():
            lines.append(line)
            begun.set()
    return lines


# ---------------------------------------------------------------------------------------- links in words
FAR = {"shm": "the nodes are not on one host"}


def test_links_are_counted_by_transport_and_by_each_reason_for_no_better_one() -> None:
    links = [
        LinkReport("p0", True, "shm"),
        LinkReport("p1", True, "gloo", FAR),
        LinkReport("p2", False, "gloo", FAR),
        LinkReport("p3", True, "gloo", {"shm": "its first chunk arrived corrupt"}),
    ]
    assert links_words(links) == [
        "1 gloo; not shm: its first chunk arrived corrupt",
        "2 gloo; not shm: the nodes are not on one host",
        "1 shm",
    ]
    assert links_words([]) == []
