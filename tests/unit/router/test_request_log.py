"""--log-requests: one line for each request, with what an operator needs and nothing of what was said."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from planner.traffic.reading import read_trace
from planner.traffic.trace import shared_tokens
from router.api.prefix_hashes import BLOCK_TOKENS, PrefixHasher
from router.config import DispatchOptions, HttpOptions
from shared.protocol.messages import Decode, Failed, Prefill, Role, Work
from shared.protocol.sampling_params import SamplingParams
from tests.patience import eventually
from tests.unit.router.fake_node import FakeNode, one_then_nothing, say_nothing
from tests.unit.router.fakes import joined_pair, joined_router
from tests.unit.router.raw_client import post, raw_client

LOGGED = HttpOptions(port=0, served_model_name="tiny", log_requests=True)
SECRET = "xyzzy"
BODY = {"text": SECRET, "sampling_params": {"max_new_tokens": 5}}


class Told:
    """The request events so far, as dicts."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def events(self) -> list[dict[str, str]]:
        lines = [record.message for record in self._caplog.records if record.message.startswith("request ")]
        return [dict(word.split("=", 1) for word in shlex.split(line)[1:]) for line in lines]

    async def last(self, count: int) -> dict[str, str]:
        """The `count`-th event: a client has its answer a moment before the event is written."""
        await eventually(lambda: len(self.events) >= count)
        assert len(self.events) == count
        return self.events[-1]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    with caplog.at_level(logging.INFO, "baton"):
        yield Told(caplog)
    assert SECRET not in caplog.text and "brown" not in caplog.text  # neither prompts nor outputs


async def test_what_is_told_of_a_generation(model_folder: Path, told: Told) -> None:
    async with joined_pair(model_folder, http=LOGGED) as (_, router, client):
        before = len(told.events)
        await client.post("/generate", json=BODY, headers={"x-request-id": "trace"})
        event = await told.last(before + 1)
        times = {name: float(event.pop(name)) for name in ("ttft_s", "e2e_s", "queue_s")}
        assert 0 < times["ttft_s"] <= times["e2e_s"] < 10
        assert times["queue_s"] == 0.5  # as the prefill node has stamped it
        assert 0 < int(prompt_tokens := event.pop("prompt_tokens")) < BLOCK_TOKENS
        assert abs(int(event.pop("arrived_ms")) / 1e3 - time.time()) < 60
        assert event.pop("prompt_lens") == prompt_tokens
        assert event.pop("router") == router.incarnation and event.pop("req").isdigit()
        assert event == {
            "request_id": "trace",
            "route": "POST /generate",
            "status": "200",
            "rid": "trace",
            "attempt": "0",
            "sequences": "1",
            "completion_tokens": "5",
            "output_lens": "5",
            "cached_tokens": "2",
            "finish": "length",
            "nodes": "decode-0,prefill-0",
        }
        chat = {"messages": [{"role": "user", "content": SECRET}], "n": 2, "max_tokens": 3, "stream": True}
        response = await client.post("/v1/chat/completions", json=chat)
        event = await told.last(before + 2)
        assert event["route"] == "POST /v1/chat/completions" and event["rid"].startswith("chatcmpl-")
        assert (event["sequences"], event["completion_tokens"], event["cached_tokens"]) == ("2", "6", "2")
        assert event["request_id"] == response.headers["x-request-id"]


async def test_a_log_is_a_trace(
    model_folder: Path, told: Told, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Lengths and arrivals are those of the requests, and prefixes are shared where the prompts share them."""
    system, other = list(range(1, 141)), list(range(2, 142))
    prompts = [[*system, 7], [*system, 8, 9], other, [*system, 7, *range(30)], [5, 6]]

    async with joined_pair(model_folder, http=LOGGED) as (_, router, client):
        before = len(told.events)

        async def generate(input_ids: object, **fields: object) -> None:
            body = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 4, **fields}}
            assert (await client.post("/generate", json=body)).status_code == 200

        await generate(prompts[:2])
        await generate(prompts[2], n=3)
        router.log_hasher.use(b"another key")
        await generate(prompts[3])
        await generate(prompts[4])
        await told.last(before + 4)
        lines = [record.message for record in caplog.records][-4:]
        assert "prefix_key" not in lines[-1] and len({told.events[at]["prefix_key"] for at in (-4, -2)}) == 2
    log = tmp_path / "router.log"
    log.write_text(
        "\n".join(f"12:03:04.120 INFO    [router-0] {record.message}" for record in caplog.records)
    )
    trace = read_trace(log)
    assert [row.input_len for row in trace.requests] == [141, 142, 140, 140, 140, 171, 2]
    assert [row.output_len for row in trace.requests] == [4] * 7
    assert 0 <= trace.requests[-1].at_s < 60 and [row.at_s for row in trace.requests] == sorted(
        row.at_s for row in trace.requests
    )
    requests = list(trace.requests)
    assert trace.requests[0].block_tokens == BLOCK_TOKENS
    whole = 140 // BLOCK_TOKENS * BLOCK_TOKENS
    assert shared_tokens(requests[:2]) == whole and shared_tokens(requests[1:3]) == 0
    assert shared_tokens(requests[2:5]) == 2 * whole, "choices of one prompt"
    assert shared_tokens([requests[0], requests[5]]) == 0, "another key"
    assert any("2 keys" in remark for remark in trace.remarks)


def test_who_shares_no_cache_shares_no_hash() -> None:
    hasher, params = PrefixHasher(), SamplingParams()
    ids = tuple(range(BLOCK_TOKENS))
    mine = hasher.hashes(Work(ids, params))
    assert (
        mine == hasher.hashes(Work((*ids, 5), params)) != hasher.hashes(Work(ids, params, extra_key="theirs"))
    )
    assert mine != PrefixHasher().hashes(Work(ids, params))
    assert hasher.hashes(Work(ids[1:], params)) == ""


async def test_refusals_and_probes(model_folder: Path, told: Told) -> None:
    http = HttpOptions(port=0, log_requests=True, api_keys=(f"key-{SECRET}",))
    known = {"Authorization": f"Bearer key-{SECRET}"}
    dispatch = DispatchOptions(max_queued_requests=1, failover_timeout_s=0.3)
    async with joined_router(model_folder, [], http=http, dispatch=dispatch, wait=False) as (_, client):
        for path in ("/metrics", "/live/state"):
            assert (await client.get(path, headers=known)).status_code == 200
        generate, chat = ("POST", "/generate", known), ("POST", "/v1/chat/completions", known)
        pattern = {**BODY, "sampling_params": {"stop_regex": "("}}
        bias = {**BODY, "sampling_params": {"logit_bias": {SECRET: "q"}}}
        requests: Sequence[tuple[str, str, dict[str, str], object, list[str]]] = (
            ("GET", "/health", {}, None, ["GET /health", "503"]),
            ("GET", f"/v1/models?key={SECRET}", {}, None, ["GET /v1/models", "401", "invalid_api_key"]),
            (
                "GET",
                "/v1/models/other",
                known,
                None,
                ["GET /v1/models/{model_id:path}", "404", "model_not_found"],
            ),
            ("GET", "/no/where", known, None, ["GET /no/where", "404"]),
            ("GET", "/no" + "o" * 500, known, None, ["GET /no" + "o" * 97, "404"]),
            (*generate, {**BODY, "stream": SECRET}, ["POST /generate", "400"]),
            (*generate, BODY, ["POST /generate", "503", "no_node"]),
            (*generate, pattern, ["POST /generate", "400"]),
            (*generate, bias, ["POST /generate", "400"]),
            (*chat, {"messages": []}, ["POST /v1/chat/completions", "400"]),
        )
        for count, (method, path, headers, body, expected) in enumerate(requests, 1):
            await client.request(method, path, headers=headers, json=body)
            event = await told.last(count)
            told_of = [event[name] for name in ("route", "status", "code") if event.get(name)]
            assert told_of == expected, event


async def test_a_full_queue_is_told(model_folder: Path, told: Told) -> None:
    dispatch = DispatchOptions(local_prefill_tokens=0, max_queued_requests=1)
    async with joined_pair(
        model_folder, prefill=say_nothing, decode=say_nothing, http=LOGGED, dispatch=dispatch
    ) as (nodes, _, client):
        before = len(told.events)
        waiting = asyncio.create_task(client.post("/generate", json=BODY))
        await nodes[1].wait_for(Decode)
        await client.post("/generate", json=BODY)
        event = await told.last(before + 1)
        assert (event["status"], event["code"]) == ("429", "queue_full") and "rid" not in event
        await client.post("/abort_request", json={"abort_all": True})
        assert (await waiting).status_code == 200
        await eventually(lambda: len(told.events) >= before + 3)
        (ended,) = [event for event in told.events[before:] if "finish" in event]
        assert (ended["finish"], ended["completion_tokens"]) == ("abort", "0") and "ttft_s" not in ended


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_and_a_node_that_fails(model_folder: Path, told: Told, stream: bool) -> None:
    may_fail = asyncio.Event()

    async def fail(node: FakeNode, message: Prefill | Decode) -> None:
        await one_then_nothing(node, message)
        if node.role is Role.DECODE and len(node.all(Decode)) > 1:
            await may_fail.wait()
            node.send(Failed(message.key, 500, SECRET))

    async with joined_pair(model_folder, prefill=fail, decode=fail, http=LOGGED) as (nodes, router, client):
        before = len(told.events)
        async with raw_client(router.http_port) as leaving:
            leaving.send(post("/generate", {**BODY, "stream": stream}))
            if stream:
                await leaving.read_until(b"data: ")
            await nodes[1].wait_for(Decode)
        event = await told.last(before + 1)
        assert event["disconnected"] == "True" and event["finish"] == "error:499"
        assert event["status"] == ("200" if stream else "499")
        if not stream:
            may_fail.set()
        async with client.stream("POST", "/generate", json={**BODY, "stream": stream}) as response:
            lines = response.aiter_lines()
            if stream:
                assert await anext(lines)
            may_fail.set()
            assert [line async for line in lines], "who leaves before the end would have gone first"
        event = await told.last(before + 2)
        assert "disconnected" not in event and event["finish"] == "error:500"
        assert event["status"] == ("200" if stream else "500")


async def test_it_is_off_by_default(model_folder: Path, told: Told) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        assert (await client.post("/generate", json=BODY)).status_code == 200
        assert (await client.get("/nowhere")).status_code == 404
    assert told.events == []
