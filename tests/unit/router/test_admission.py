"""The bounded queue, as clients meet it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.config import DispatchOptions
from router.dispatch.fleet_view import MAX_RETRY_AFTER_S, WaitingQueue
from router.request.admission import Admissions
from shared.errors import RequestError
from shared.protocol.messages import Decode
from tests.unit.router.fake_node import say_nothing
from tests.unit.router.fakes import figure, joined_pair, openai_client, until_queued

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: Sequence[tuple[str, dict[str, object]]] = (
    ("/generate", {"text": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", CHAT),
)


@pytest.mark.parametrize(("waited_s", "expected"), [(0.01, 1), (4.5, 5), (1e3, MAX_RETRY_AFTER_S)])
def test_a_client_may_come_again_after_the_time_that_the_first_has_waited(
    waited_s: float, expected: int
) -> None:
    now = 1000.0
    queue = WaitingQueue(lambda: now)
    assert queue.wait_s == 0
    queue.join("served")
    now += 20
    for i in range(10):
        queue.join(f"{i}")
    for _ in range(2):
        queue.leave("served")
    now += waited_s
    assert len(queue) == 10
    with pytest.raises(RequestError) as caught:
        Admissions(queue, 10, lambda: None).admit()
    assert (caught.value.status, caught.value.retry_after_s) == (429, expected)


def test_names_are_free_once_all_who_share_them_have_ended() -> None:
    admissions = Admissions(WaitingQueue(time.monotonic), 100, lambda: None)
    with admissions.admit() as first, admissions.admit() as second:
        first.take(["a_0", "a_1"], [1, 1], whole="a", shared=True)
        second.take(["a_0", "a_1"], [1, 1], whole="a", shared=True)
        first.release_rids()
        first.release_rids()
        for name in ("a", "a_1"):
            with pytest.raises(RequestError, match=name), admissions.admit() as third:
                third.take([name], [1], whole=name, shared=False)
        assert admissions.find("a") == admissions.find(None) == [second]
        assert admissions.find("a_") == [], "a name that begins like another is not meant"
    assert (admissions.holders, admissions.num_queued) == ({}, 0)
    with pytest.raises(RequestError), admissions.admit() as admission:
        admission.take(["x", "x"], [1, 1], whole=None, shared=False)
    assert (admissions.holders, admissions.num_queued) == ({}, 0)


def check_rejected(response: httpx.Response) -> None:
    assert response.status_code == 429, response.text
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


async def test_beyond_the_bound_every_route_refuses(model_folder: Path) -> None:
    """A batch is let in whole or not at all."""
    dispatch = DispatchOptions(local_prefill_tokens=0, max_queued_requests=4)
    scripts: Any = {"prefill": say_nothing, "decode": say_nothing, "dispatch": dispatch}
    async with joined_pair(model_folder, **scripts) as ((_, decode), router, client):
        waiting = [asyncio.create_task(client.post(path, json=body)) for path, body in ROUTES]
        await decode.wait_for(Decode, 3)
        await until_queued(client, 3)
        several = ({"text": ["a", "b"]}, {"prompt": ["a", "b"]}, {**CHAT, "n": 2})
        for (path, _), body in zip(ROUTES, several, strict=True):
            for stream in (False, True):
                check_rejected(await client.post(path, json={**body, "stream": stream}))
        waiting.append(asyncio.create_task(client.post("/generate", json={"text": "a"})))
        await until_queued(client, 4)
        for path, body in ROUTES:
            check_rejected(await client.post(path, json=body))
        assert await figure(client, "baton:num_rejected_requests_total") == 9
        async with openai_client(router.url) as sdk:
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.completions.create(model="tiny", prompt="a")
            assert caught.value.type == "rate_limit_error"
        for path in ("/health", "/v1/models", "/server_info"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert len(decode.all(Decode)) == 4
        aborted = await client.post("/abort_request", json={"abort_all": True})
        assert aborted.json()["aborted"] == 4
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 4
        await until_queued(client, 0)


async def test_places_of_requests_that_are_refused_come_back(model_folder: Path) -> None:
    dispatch = DispatchOptions(local_prefill_tokens=0, max_queued_requests=4)
    async with joined_pair(model_folder, dispatch=dispatch) as (_, _, client):
        for path, body in (
            *((path, {**body, "stop": 5, "sampling_params": {"stop": 5}}) for path, body in ROUTES),
            ("/generate", {"text": ["a", ""]}),  # seen when it is tokenized
            ("/v1/completions", {"prompt": ""}),
            ("/generate", {"text": ["a"] * 5}),  # more than there are places
        ):
            assert (await client.post(path, json=body)).status_code == 400
        await until_queued(client, 0)
        assert await figure(client, "baton:num_rejected_requests_total") == 0
