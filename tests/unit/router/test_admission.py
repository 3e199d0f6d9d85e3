"""The bounded queue, as clients meet it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import openai
import pytest

from router.dispatch.fleet_view import MAX_RETRY_AFTER_S, WaitingQueue
from router.http.config import DispatchOptions
from router.request.admission import Admissions
from router.server import Router
from shared.errors import RequestError
from shared.protocol.messages import Decode, NodeLimits
from tests.unit.router.fake_node import FakeNode, one_then_nothing, say_nothing
from tests.unit.router.fakes import figure, joined_router, openai_client, pair, until_queued

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: Sequence[tuple[str, dict[str, object]]] = (
    ("/generate", {"text": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", CHAT),
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("waited_s", "expected"), [(0.01, 1), (4.5, 5), (1e3, MAX_RETRY_AFTER_S)])
def test_a_client_may_come_again_after_the_time_that_the_first_has_waited(
    waited_s: float, expected: int
) -> None:
    clock = Clock()
    queue = WaitingQueue(clock)
    assert queue.wait_s == 0
    queue.join("served")
    clock.now += 20
    for i in range(10):
        queue.join(f"{i}")
    for _ in range(2):
        queue.leave("served")
    clock.now += waited_s
    assert len(queue) == 10
    with pytest.raises(RequestError) as caught:
        Admissions(queue, 10, lambda: None).admit()
    assert (caught.value.status, caught.value.retry_after_s) == (429, expected)


@contextlib.asynccontextmanager
async def full(
    model_folder: Path, limit: int, script: Callable[..., object] = say_nothing
) -> AsyncIterator[tuple[Router, httpx.AsyncClient, list[FakeNode]]]:
    """A router with a queue of `limit`, and nodes that follow a script."""
    dispatch = DispatchOptions(local_prefill_tokens=0, max_queued_requests=limit, failover_timeout_s=0.3)
    async with pair(prefill=script, decode=script) as nodes:
        for node in nodes:
            node.limits = NodeLimits(context_length=5000, max_total_num_tokens=5000, max_running_requests=8)
        async with joined_router(model_folder, list(nodes), dispatch=dispatch) as (router, client):
            yield router, client, list(nodes)


def check_rejected(response: httpx.Response) -> None:
    assert response.status_code == 429, response.text
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


async def test_beyond_the_bound_every_route_refuses(model_folder: Path) -> None:
    async with full(model_folder, 3) as (router, client, nodes):
        waiting = [asyncio.create_task(client.post(path, json=body)) for path, body in ROUTES]
        await nodes[1].wait_for(Decode, 3)
        await until_queued(client, 3)
        for path, body in ROUTES:
            for stream in (False, True):
                check_rejected(await client.post(path, json={**body, "stream": stream}))
        assert await figure(client, "baton:num_rejected_requests_total") == 6
        assert len(nodes[1].all(Decode)) == 3
        async with openai_client(router.url) as sdk:
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.completions.create(model="tiny", prompt="a")
            assert caught.value.type == "rate_limit_error"
        for path in ("/health", "/v1/models", "/server_info"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        aborted = await client.post("/abort_request", json={"abort_all": True})
        assert aborted.json()["aborted"] == 3
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 3
        await until_queued(client, 0)


async def test_running_requests_are_not_counted(model_folder: Path) -> None:
    async with full(model_folder, 1, one_then_nothing) as (_, client, nodes):
        running = []
        for count in range(1, 6):
            running.append(asyncio.create_task(client.post("/generate", json={"text": "a"})))
            await nodes[1].wait_for(Decode, count)
            await until_queued(client, 0)
        await client.post("/abort_request", json={"abort_all": True})
        answers = [response.json() for response in await asyncio.gather(*running)]
        assert all(answer["output_ids"] == nodes[1].story[:1] for answer in answers)
        assert await figure(client, "baton:num_rejected_requests_total") == 0


async def test_a_batch_is_let_in_whole_or_not_at_all(model_folder: Path) -> None:
    async with full(model_folder, 4) as (_, client, nodes):
        two = {"text": "a", "sampling_params": {"n": 2}}
        first = asyncio.create_task(client.post("/generate", json=two))
        await nodes[1].wait_for(Decode, 2)
        check_rejected(await client.post("/generate", json={"text": ["a", "b", "c"]}))
        check_rejected(await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]}))
        check_rejected(await client.post("/v1/chat/completions", json={**CHAT, "n": 3}))
        assert len(nodes[1].all(Decode)) == 2
        never = await client.post("/generate", json={"text": ["a"] * 5})
        assert never.status_code == 400 and "--max-queued-requests" in never.json()["error"]["message"]
        second = asyncio.create_task(client.post("/generate", json={"text": ["a", "b"]}))
        await nodes[1].wait_for(Decode, 4)
        await client.post("/abort_request", json={"abort_all": True})
        assert {response.status_code for response in (await first, await second)} == {200}
        await until_queued(client, 0)


async def test_a_burst_is_counted_exactly(model_folder: Path) -> None:
    """Long prompts are tokenized in a thread: their places are taken before that, and no more than there are."""
    async with full(model_folder, 8) as (_, client, nodes):
        text = "The quick brown fox " * 125
        burst = [asyncio.create_task(client.post("/generate", json={"text": text})) for _ in range(30)]
        rejected = [await next_done for next_done in itertools.islice(asyncio.as_completed(burst), 22)]
        for response in rejected:
            check_rejected(response)
        await nodes[1].wait_for(Decode, 8)
        assert await figure(client, "baton:num_rejected_requests_total") == 22
        await client.post("/abort_request", json={"abort_all": True})
        answers = await asyncio.gather(*burst)
        assert sorted(response.status_code for response in answers) == [200] * 8 + [429] * 22
        await until_queued(client, 0)


@pytest.mark.parametrize("how", ["bad body", "node dies"])
async def test_places_come_back(model_folder: Path, how: str) -> None:
    async with full(model_folder, 2) as (_, client, nodes):
        if how == "bad body":
            for path, body in ROUTES:
                wrong = {**body, "stop": 5, "sampling_params": {"stop": 5}}
                assert (await client.post(path, json=wrong)).status_code == 400
            for path, body in (("/generate", {"text": ["a", ""]}), ("/v1/completions", {"prompt": ""})):
                assert (await client.post(path, json=body)).status_code == 400  # seen when it is tokenized
        else:
            asked = asyncio.create_task(client.post("/generate", json={"text": ["a", "b"]}))
            await nodes[1].wait_for(Decode, 2)
            await nodes[1].stop()
            assert (await asked).status_code == 503
        await until_queued(client, 0)
        assert await figure(client, "baton:num_rejected_requests_total") == 0
