"""A tiny model folder, and a router in this process that joins scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import zmq
import zmq.asyncio

from router.config import ConnectionOptions, DispatchOptions, FleetOptions, HttpOptions, RouterConfig
from router.http.http_socket import listen_http
from router.nodes.join_socket import JoinListener, JoinSocket
from router.server import Router, load_model
from router.topology import LocalTopology
from shared.protocol.messages import (
    Decode,
    NodeLimits,
    Prefill,
    Role,
)
from shared.protocol.security import FleetKey
from tests.patience import PATIENCE_S, eventually
from tests.unit.router.fake_node import EOS, LIMITS, FakeNode, byte_level_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.thinking }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERMES = TOOLS_TEMPLATE + "{# <tool_call> <think> #}"
"""The family is found by these words."""


def write_model(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, context_length: int = 256
) -> Path:
    """A folder with all that the router reads; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_length,
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"eos_token": EOS} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def new_client(base_url: str = "") -> httpx.AsyncClient:
    """One that reads no certificates, which takes 30 ms: there is no TLS."""
    return httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S, verify=False)


def openai_client(url: object, api_key: str = "none") -> openai.AsyncOpenAI:
    """OpenAI's own client, of the router at `url`."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, http_client=new_client())


@contextlib.asynccontextmanager
async def joined_router(
    model_folder: Path | None,
    nodes: list[FakeNode],
    *,
    http: HttpOptions | None = None,
    dispatch: DispatchOptions | None = None,
    connections: ConnectionOptions | None = None,
    wait: bool = True,
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """A real router on free ports, joined to `nodes`, and a client for it."""
    config = RouterConfig(
        model=str(model_folder) if model_folder else None,
        fleet=FleetOptions(
            local=LocalTopology(0, 0), join=tuple((n.role, n.address) for n in nodes), control_port=0
        ),
        http=http or HttpOptions(port=0, served_model_name="tiny"),
        dispatch=dispatch or DispatchOptions(local_prefill_tokens=0, failover_timeout_s=0.3),
        connections=connections or ConnectionOptions(),
    )
    async with (
        serving_router(config) as router,
        new_client(router.url) as client,
    ):
        if wait:

            async def joined() -> bool:
                states = (await client.get("/server_info")).json()["internal_states"]
                return len(states) == len(nodes)

            await eventually(joined)
            await until_loads(client, *nodes)
        yield router, client


async def until_loads(client: httpx.AsyncClient, *nodes: FakeNode) -> None:
    """Until the router has heard all that these nodes have sent so far, and knows their present loads.

    Every pong of a node tells more progress, unless it is to seem stalled or silent: such a node is left out.
    """
    sent = {node.node_id: node.progress for node in nodes if not (node.silent or node.stalled)}

    async def known() -> bool:
        states = (await client.get("/server_info")).json()["internal_states"]
        heard = {state["node_id"]: state["progress"] for state in states}
        return all(heard.get(node_id, 0) > progress for node_id, progress in sent.items())

    await eventually(known)


@contextlib.asynccontextmanager
async def serving_router(config: RouterConfig) -> AsyncIterator[Router]:
    """A router in this process, without a supervisor: it listens on the port of `config`."""
    model = load_model(config.model, config) if config.model else None
    with listen_http(config.http.host, config.http.port) as http_socket:
        async with Router(config, model) as router:
            try:
                await router.serve(http_socket)
                yield router
            finally:
                await router.stop_serving()


@contextlib.asynccontextmanager
async def join_socket_of(listener: JoinListener, fleet_key: FleetKey | None = None) -> AsyncIterator[int]:
    """The port where nodes announce themselves, as a supervisor has it."""
    context = zmq.asyncio.Context()
    authenticator = fleet_key.authenticator(context) if fleet_key is not None else None
    join_socket = JoinSocket(context, fleet_key)
    listening = asyncio.create_task(join_socket.listen(listener))
    try:
        yield join_socket.bind("127.0.0.1", 0)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        join_socket.close()
        if authenticator is not None:
            authenticator.stop()
        context.destroy()


@contextlib.asynccontextmanager
async def pair(
    *, limits: NodeLimits = LIMITS, **prefill_and_decode: object
) -> AsyncIterator[tuple[FakeNode, FakeNode]]:
    """One node of each role, with scripts."""
    async with (
        FakeNode(Role.PREFILL, limits=limits) as prefill,
        FakeNode(Role.DECODE, limits=limits) as decode,
    ):
        for name, script in prefill_and_decode.items():
            {"prefill": prefill, "decode": decode}[name].script = script
        yield prefill, decode


@contextlib.asynccontextmanager
async def joined_trio(
    model_folder: Path | None, **scripts_and_options: Any
) -> AsyncIterator[tuple[tuple[FakeNode, FakeNode, FakeNode], Router, httpx.AsyncClient]]:
    """A router that is joined to one node of each role, and to a decode node more."""
    async with (
        FakeNode(Role.DECODE, "decode-1") as other,
        joined_pair(model_folder, other, **scripts_and_options) as (nodes, router, client),
    ):
        yield (*nodes, other), router, client


@contextlib.asynccontextmanager
async def joined_pair(
    model_folder: Path | None, *others: FakeNode, **scripts_and_options: Any
) -> AsyncIterator[tuple[tuple[FakeNode, FakeNode], Router, httpx.AsyncClient]]:
    """A router that is joined to one node of each role, and to `others`."""
    options = dict(scripts_and_options)
    of_pair = {name: options.pop(name) for name in ("prefill", "decode", "limits") if name in options}
    async with (
        pair(**of_pair) as nodes,
        joined_router(model_folder, [*nodes, *others], **options) as (router, client),
    ):
        yield nodes, router, client


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {node["node_id"]: node["state"] for node in (await client.get("/fleet")).json()["nodes"]}


async def until_states(client: httpx.AsyncClient, **wanted: str) -> None:
    named = {name.replace("_", "-"): state for name, state in wanted.items()}

    async def reached() -> bool:
        return await states(client) == named

    await eventually(reached)


def wait_before_story(*nodes: FakeNode) -> asyncio.Event:
    """They begin to tell when this is set."""
    release, story = asyncio.Event(), nodes[0].script

    async def wait(node: FakeNode, message: Prefill | Decode) -> None:
        await release.wait()
        await story(node, message)

    for node in nodes:
        node.script = wait
    return release


async def figure(client: httpx.AsyncClient, name: str) -> float:
    """The first value of a metric."""
    found = re.search(rf"^{name}{{.*}} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def until_queued(client: httpx.AsyncClient, count: int) -> None:
    """Until so many sequences wait for their first token."""

    async def reached() -> bool:
        return await figure(client, "baton:num_queued_reqs") == count

    await eventually(reached)


async def until_health(client: httpx.AsyncClient, status: str) -> httpx.Response:
    """Until /health tells this status; its answer."""

    async def reached() -> httpx.Response | None:
        health = await client.get("/health")
        return health if health.json()["status"] == status else None

    return await eventually(reached)


def events(body: str) -> list[object]:
    """The parsed events of a stream; "[DONE]" stays as it is."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
