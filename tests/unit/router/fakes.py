"""A scripted node over real ZMQ sockets, a tiny model folder, and a router that joins such nodes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec
import openai
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from router.http.config import ConnectionOptions, DispatchOptions, FleetOptions, HttpOptions, RouterConfig
from router.http.http_socket import listen_http
from router.http.topology import LocalTopology
from router.nodes.join_socket import JoinSocket
from router.server import Router, load_model
from shared.protocol.dial_socket import from_frames, to_frames
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Answered,
    CacheResync,
    Cancel,
    Decode,
    Drain,
    Drained,
    Failed,
    Finish,
    Flush,
    KVLayout,
    Leaving,
    Load,
    NodeHello,
    NodeLimits,
    NodeRef,
    NodeToRouter,
    Peers,
    Ping,
    Pong,
    Prefill,
    Refused,
    Relay,
    ReqKey,
    ReqReport,
    Role,
    RouterHello,
    RouterToNode,
    SetRole,
    Stamp,
    StartProfile,
    Stop,
    StopProfile,
    Struct,
    TokenEntry,
    Tokens,
)
from shared.protocol.router_relay import RouterRelay
from shared.protocol.security import FleetKey
from tests.patience import PATIENCE_S, eventually, until

LAYOUT = KVLayout("fingerprint", "float32", 16, 2, 2, 8)
LIMITS = NodeLimits(context_length=256, max_total_num_tokens=200, max_running_requests=8)
STORY = "The quick brown fox jumps over the lazy dog; größer als 5 €, 日本語 and 🦊 too. "
EOS = "<|eos|>"
PREFILL_STAMPS = (Stamp("prefill", "queued", 1.0), Stamp("prefill", "prefilling", 1.5))
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

M = TypeVar("M")
Script = Callable[["FakeNode", Prefill | Decode], Awaitable[None]]
_decoder = msgspec.msgpack.Decoder(RouterToNode)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([STORY * 20, "def f(x):\n    return x\n" * 20], trainer)
    return tokenizer


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


class _ToRouters:
    """A scripted node as an Outbox."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def send(self, to: str, message: Struct) -> None:
        self._node.send(cast("NodeToRouter", message), to)


class FakeNode:
    """Speaks the node's side of the protocol. What it does with a request is its script's business.

    `heard` holds all but pings. The default scripts tell STORY, token by token, as a real pair would.
    """

    def __init__(
        self,
        role: Role,
        node_id: str = "",
        *,
        script: Script | None = None,
        layout: KVLayout = LAYOUT,
        limits: NodeLimits = LIMITS,
        flags: dict[str, str | int | float | bool | None] | None = None,
    ) -> None:
        self.role = role
        self.node_id = node_id or f"{role}-0"
        self.script = script or (tell_first_token if role is Role.PREFILL else tell_story)
        self.layout = layout
        self.limits = limits
        self.flags = flags or {}
        self.heard: list[RouterToNode] = []
        self.load = Load()
        self.cache_seq: int | None = None
        self.before_hello: list[NodeToRouter] = []
        self.version = PROTOCOL_VERSION
        self.silent = False
        self.stalled = False
        self.progress = 0
        self.refuses = ""
        self.fixed_role = False
        self.refuses_role = ""
        self.hears_roles = True
        self.comes_back = True
        self._role_change: asyncio.Task[None] | None = None
        self.may_leave, self.may_return = asyncio.Event(), asyncio.Event()
        """For another role."""
        self.may_leave.set()
        self.may_return.set()
        self.flushes = True
        self.profiles = True
        self.profile_calls: list[StartProfile | StopProfile] = []
        self.identities: list[str] = []
        self._identity_of: dict[str, bytes] = {}
        self.story = [*byte_level_tokenizer().encode(STORY).ids]
        self.delay_s = 0.0
        self._news = asyncio.Event()
        self._context = zmq.asyncio.Context.instance()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FakeNode:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, port: int = 0, incarnation: str = "a") -> None:
        self._relay = RouterRelay(_ToRouters(self), lambda: list(self._identity_of), time.monotonic)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 30_000
        self._bind(port)
        self.address = self._socket.last_endpoint.decode().rstrip("\0")
        self.port = int(self.address.rpartition(":")[2])
        self.ref = NodeRef(self.node_id, f"{self.node_id}-{incarnation}", self.address)
        self._tasks = [asyncio.create_task(self._listen())]

    def _bind(self, port: int) -> None:
        """A socket that was closed gives its port back a moment later, from ZMQ's own thread."""

        def bound() -> bool:
            try:
                self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            except zmq.ZMQError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
                return False
            return True

        until(bound)

    async def stop(self) -> None:
        """Close the socket, as the death of a process would."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._socket.close()

    async def become(self, role: Role) -> None:
        """Leave, and come back in another role at the same address."""
        await self.may_leave.wait()
        for router in self._identity_of:
            self.send(Leaving(f"{self.node_id} becomes a {role} node"), router)
        await self.stop()
        self._identity_of.clear()
        await self.may_return.wait()
        if self.comes_back:
            self.role, self.script = role, tell_first_token if role is Role.PREFILL else tell_story
            self.start(self.port, incarnation=f"{self.ref.incarnation[-1]}{role[0]}")

    def send(self, message: NodeToRouter, router: str = "") -> None:
        """To a router of this incarnation, or to the one that was heard last."""
        to = self._identity_of.get(router, self._router)
        sent = self._socket.send_multipart([to, *to_frames(msgspec.msgpack.encode(message))], zmq.DONTWAIT)
        assert sent.exception() is None

    def drain(self) -> None:
        """Say to all routers that an operator has removed this node."""
        self._relay.drain(0.0)

    def tokens(
        self,
        key: ReqKey,
        position: int,
        token_ids: list[int],
        finish: Finish | None = None,
        report: ReqReport | None = None,
    ) -> None:
        self.send(Tokens((TokenEntry(key, position, tuple(token_ids), finish, report),)), key.router)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1) -> M:
        """The `count`-th message of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.all(kind)[count - 1]

    async def _listen(self) -> None:
        while True:
            self._router, *frames = await self._socket.recv_multipart()
            message = _decoder.decode(from_frames(frames))
            match message:
                case RouterHello():
                    self.identities.append(self._router.decode())
                    self._identity_of[message.router] = self._router
                    for message_before in self.before_hello:
                        self.send(message_before)
                    if self.refuses:
                        self.send(Refused(self.refuses))
                        continue
                    hello = NodeHello(
                        self.ref,
                        self.role,
                        self.layout,
                        self.limits,
                        self.flags,
                        self.version,
                        self.fixed_role,
                    )
                    self.send(hello)
                    self._relay.greet(message.router, resume=message.resume)
                case Drain() if self._role_change is not None and not self._role_change.done():
                    pass  # it has been let go
                case Drain(timeout_s):
                    self._relay.drain(timeout_s)
                case SetRole() if not self.hears_roles:
                    pass
                case SetRole(call_id, role, timeout_s):
                    if not self.refuses_role:
                        self._relay.drain(timeout_s, role)
                    self.send(Answered(call_id, not self.refuses_role, self.refuses_role))
                case Drained():
                    self._relay.let_go(self._router.decode().split("|")[1])
                    if (next_role := self._relay.next_role) is not None:
                        self._role_change = asyncio.create_task(self.become(next_role))
                case Relay():
                    self._relay.relay(self._router.decode().split("|")[1], message)
                case Ping(seq):
                    if not self.silent:
                        self.progress += not self.stalled
                        load = msgspec.structs.replace(self.load, progress=self.progress)
                        self.send(Pong(seq, load, self.cache_seq))
                    continue
                case Flush(call_id):
                    self.send(Answered(call_id, self.flushes))
                case StartProfile(call_id) | StopProfile(call_id):
                    self.profile_calls.append(message)
                    self.send(Answered(call_id, self.profiles, f"/traces/{self.ref.node_id}"))
                case Prefill() | Decode():
                    self._tasks.append(asyncio.create_task(self._run(message)))
                case Peers() | Cancel() | Stop() | CacheResync():
                    pass
            self.hear(message)

    def hear(self, message: RouterToNode) -> None:
        """A message that is no ping has come."""
        self.heard.append(message)
        self._news.set()

    async def _run(self, message: Prefill | Decode) -> None:
        try:
            await self.script(self, message)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            self.send(Failed(message.key, 500, f"the script failed: {e!r}"), message.key.router)

    def gone(self, key: ReqKey) -> bool:
        return any(isinstance(m, Cancel | Stop) and m.key == key for m in self.heard)


async def say_nothing(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""


async def one_then_nothing(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""
    node.tokens(message.key, 0, node.story[:1])


def _num_cached(message: Prefill | Decode) -> int:
    return min(2, len(message.work.input_ids))


async def tell_first_token(node: FakeNode, message: Prefill | Decode) -> None:
    """A prefill node's part: position 0, and the end when nothing follows."""
    report = ReqReport(cached_tokens=_num_cached(message), stamps=PREFILL_STAMPS)
    wanted = message.work.params.max_new_tokens
    finish = Finish("length") if wanted <= 1 else None
    node.tokens(message.key, 0, node.story[: min(wanted, 1)], finish, report)


async def tell_story(node: FakeNode, message: Decode) -> None:
    """A decode node's part: every position, each in a message of its own, and the end."""
    wanted = message.work.params.max_new_tokens
    for position in range(wanted):
        if node.gone(message.key):
            return
        await asyncio.sleep(node.delay_s)
        last = position == wanted - 1
        report = None
        if last:
            # What the handoff brought is told again: the prefill node's own message may be slower.
            split = message.prefill is not None
            stamps = (Stamp("decode", "transferring", 2.0), Stamp("decode", "decoding", 2.25))
            report = ReqReport(
                cached_tokens=_num_cached(message) if split else 0,
                stamps=(*PREFILL_STAMPS, *stamps) if split else stamps,
                kv_pages_transferred=3,
                kv_bytes_transferred=3000,
            )
        token_id = node.story[position % len(node.story)]
        node.tokens(message.key, position, [token_id], Finish("length") if last else None, report)
    if wanted == 0:
        node.tokens(message.key, 0, [], Finish("length"))


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
    base: Path | None = None,
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
async def join_socket_of(router: Router, fleet_key: FleetKey | None = None) -> AsyncIterator[int]:
    """The port where nodes announce themselves to `router`, as a supervisor has it."""
    context = zmq.asyncio.Context()
    authenticator = fleet_key.authenticator(context) if fleet_key is not None else None
    join_socket = JoinSocket(context, fleet_key)
    listening = asyncio.create_task(join_socket.listen(router.membership.on_announcement))
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


async def until_figure(client: httpx.AsyncClient, name: str, value: float) -> None:
    async def reached() -> bool:
        return await figure(client, name) == value

    await eventually(reached)


async def until_queued(client: httpx.AsyncClient, count: int) -> None:
    """Until so many sequences wait for their first token."""
    await until_figure(client, "baton:num_queued_reqs", count)


async def until_sampled(client: httpx.AsyncClient) -> None:
    """Until `/live` has a sample."""

    async def sampled() -> bool:
        return bool((await client.get("/live/state")).json()["samples"])

    await eventually(sampled)


def events(body: str) -> list[object]:
    """The parsed events of a stream; "[DONE]" stays as it is."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
