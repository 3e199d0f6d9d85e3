"""`/live`: what nodes and this router do now, second by second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.api.live_state import LiveState, NodeNow, links_words
from router.nodes.membership import Membership
from router.nodes.status import FleetStatus
from router.text.served_model import ModelSlot
from shared.protocol.messages import Finish, LinkReport, Load, Loading, Role
from tests.patience import eventually
from tests.unit.router.dispatched import SeenFleet
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import joined_pair, new_client, write_model
from tests.unit.router.test_membership import dialled, new_membership


@asynccontextmanager
async def watching(*nodes: FakeNode) -> AsyncIterator[tuple[LiveState, SeenFleet, Membership]]:
    """What is told of real connections to these nodes, and of a dispatcher of others, whose clock it has."""
    fleet, slot = SeenFleet(1), ModelSlot()
    async with new_membership() as (membership, _):
        for node in nodes:
            await dialled(membership, node)
        status = FleetStatus(membership, slot)
        live = LiveState(membership, fleet.dispatcher, fleet.metrics, status, slot, clock=lambda: fleet.now)
        yield live, fleet, membership


def sample(live: LiveState, fleet: SeenFleet) -> None:
    """A second is over."""
    fleet.wait(1)
    live.sample()


async def node_with(live: LiveState, name: str, **wanted: object) -> NodeNow:
    """The node, as soon as it is told with these values."""

    def found() -> NodeNow | None:
        for node in live.event().nodes:
            if node.node_id == name and all(getattr(node, k) == v for k, v in wanted.items()):
                return node
        return None

    return await eventually(found)


async def test_the_first_event_has_all_samples_and_later_ones_what_is_new() -> None:
    async with watching() as (live, fleet, _):
        for _ in range(2):
            sample(live, fleet)
        feed = live.feed()
        first, later = await anext(feed), asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        sample(live, fleet)
        assert [len(event.samples) for event in (first, await later)] == [2, 1]
        assert live.event().samples == [*first.samples, *(await later).samples]


async def test_a_sample_may_follow_the_start_at_once() -> None:
    async with watching() as (live, _, _):
        live.sample()
        assert live.event().samples[0].tokens_per_s == 0


async def test_traffic_becomes_samples() -> None:
    async with watching() as (live, fleet, _):
        req = fleet.start(max_new_tokens=3)
        for ids in ((), (7,), (7, 7)):
            fleet.tell(req, *ids, finish=Finish("length") if len(ids) == 2 else None)
            sample(live, fleet)
        samples = live.event().samples
        assert [(s.num_running_reqs, s.num_queue_reqs) for s in samples] == [(0, 1), (1, 0), (0, 0)]
        assert [s.tokens_per_s for s in samples] == [0, 1, 2]
        assert samples[0].ttft_s is None
        for percentiles in (samples[-1].ttft_s, samples[-1].itl_s):
            assert percentiles is not None
            assert len(percentiles) == 3 and list(percentiles) == sorted(percentiles)


async def test_nodes_are_told_as_their_pongs_say() -> None:
    async with FakeNode(Role.PREFILL) as prefill, FakeNode(Role.DECODE) as decode:
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
        async with watching(decode, prefill) as (live, fleet, membership):
            node = await node_with(live, "decode-0", num_running_reqs=3)
            assert (node.role, node.state, node.reason) == ("decode", "live", "")
            assert (node.num_queue_reqs, node.num_transferring_reqs, node.num_bootstrapping_reqs) == (2, 1, 4)
            pages = (node.num_pages, node.num_free_pages, node.num_cached_pages, node.num_held_pages)
            assert pages == (100, 50, 30, 20)
            assert (node.num_links, node.links, node.links_words) == (1, {"shm": 1}, ["1 shm"])
            assert [n.node_id for n in live.event().nodes] == ["prefill-0", "decode-0"]
            sample(live, fleet)
            added_up = live.event().samples[-1].decode
            assert (added_up.num_nodes, added_up.num_queue_reqs) == (1, 2 + 4)

            membership.on_announcement(Loading("prefill-7", Role.PREFILL, "weights", 0.25))
            node = await node_with(live, "prefill-7", state="loading")
            assert (node.role, node.reason, node.loaded) == ("prefill", "weights", 0.25)

            await decode.stop()
            gone = await node_with(live, "decode-0", state="gone")
            assert gone.reason and gone.num_pages == 0
            told = live.event().router
            assert told.status == "unavailable" and "decode-0" in told.reason


async def test_rates_are_how_fast_counters_grow() -> None:
    async with FakeNode(Role.DECODE) as decode:
        decode.load = Load(num_generated_tokens=1_000_000, kv_bytes_transferred=10**12, num_pages=1)
        async with watching(decode) as (live, fleet, _):
            await node_with(live, "decode-0", num_pages=1)
            sample(live, fleet)
            (node,) = live.event().nodes
            assert (node.tokens_per_s, node.kv_bytes_per_s) == (0, 0), "that was before"
            decode.load = Load(
                num_generated_tokens=1_000_500,
                num_prompt_tokens=300,
                num_cached_tokens=50,
                kv_bytes_transferred=10**12 + 8000,
            )

            def rated() -> NodeNow | None:
                sample(live, fleet)
                (node,) = live.event().nodes
                return node if node.tokens_per_s else None

            node = await eventually(rated)
            assert 0 < node.tokens_per_s < 1_000_000, "what was before is not in it"
            assert node.kv_bytes_per_s == pytest.approx(16 * node.tokens_per_s, rel=0.001)
            assert node.prompt_tokens_per_s == pytest.approx(node.tokens_per_s / 2, rel=0.001)
            assert live.event().samples[-1].decode.tokens_per_s == node.tokens_per_s


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
async def test_the_router_says_whether_it_can_chat(tmp_path: Path, template: str | None) -> None:
    folder = write_model(tmp_path, chat_template=template)
    async with joined_pair(folder) as (_, _, client):
        told = (await client.get("/live/state")).json()["router"]
        assert told["has_chat_template"] is (template is not None)
        assert (told["status"], told["model"], told["context_length"]) == ("ok", "tiny", 256)


async def test_a_feed_ends_when_the_router_stops(model_folder: Path) -> None:
    lines: list[str] = []
    begun = asyncio.Event()

    async def watch(url: str) -> None:
        async with new_client() as client, client.stream("GET", f"{url}/live") as feed:
            assert feed.headers["content-type"].startswith("text/event-stream")
            async for line in feed.aiter_lines():
                lines.append(line)
                begun.set()

    async with joined_pair(model_folder) as (_, router, _):
        watching = asyncio.create_task(watch(router.url))
        await begun.wait()
    await watching
    assert lines[-2:] == ["data: [DONE]", ""]


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
