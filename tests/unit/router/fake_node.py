"""A scripted node over real ZMQ sockets. It imports little, since processes of it start often."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
from tests.patience import PATIENCE_S, until

LAYOUT = KVLayout("fingerprint", "float32", 16, 2, 2, 8)
LIMITS = NodeLimits(context_length=256, max_total_num_tokens=200, max_running_requests=8)
STORY = "The quick brown fox jumps over the lazy dog; größer als 5 €, 日本語 and 🦊 too. "
EOS = "<|eos|>"
PREFILL_STAMPS = (Stamp("prefill", "queued", 1.0), Stamp("prefill", "prefilling", 1.5))

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
