"""A node's side of its links to routers: answers greetings and pings, queues requests, batches tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared import log
from shared.protocol.messages import (
    Answered,
    CacheEvents,
    Decode,
    Drain,
    Drained,
    Failed,
    Leaving,
    Lend,
    Load,
    Move,
    Moved,
    MoveWanted,
    NodeHello,
    NotCached,
    Outbox,
    Ping,
    Pong,
    Prefill,
    Refused,
    Relay,
    ReqKey,
    Role,
    RouterHello,
    RouterToNode,
    RunsAlone,
    SetRole,
    TokenEntry,
    Tokens,
    Work,
    other_version,
)
from shared.protocol.router_relay import RouterRelay
from shared.timeline import Clock

MAX_REMEMBERED_KEYS = 65_536
MAX_REMEMBERED_ROUTERS = 1024


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A message that the scheduler has to act on."""

    router: str
    message: RouterToNode


class RouterPort:
    """Shared by two threads: `on_message` runs on the control thread, all other methods on the scheduler's.

    RouterHello and Ping are answered at once, on the control thread, so a long step is not mistaken for silence.
    """

    def __init__(
        self, outbox: Outbox, hello: NodeHello, load: Callable[[], Load], wake: threading.Event, clock: Clock
    ) -> None:
        self._outbox = outbox
        self.hello = hello
        self._load = load
        self._wake = wake
        self._clock = clock
        self._inbox: deque[FromRouter] = deque()
        self._last_heard: dict[str, float] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()
        """Routers whose other messages do not count."""
        self._relay = RouterRelay(outbox, lambda: list(self._last_heard), clock)
        self._followers: dict[str, None] = {}
        """Routers that have been sent all of the cache, and follow its events; used by the scheduler thread only."""
        self._cache_seq: int | None = None
        self._dispatched: OrderedDict[tuple[ReqKey, bool], None] = OrderedDict()
        """A node may send the pages of a request and receive them: it lends to the node that prefills for it."""
        self._entries: dict[str, list[TokenEntry]] = {}
        self._unreachable: set[str] = set()
        self._dispatch_repeated = log.LimitedWarning("dispatch_repeated", clock)

    # ---------------------------------------------------------------------------- the control thread
    def on_message(self, router: str, message: RouterToNode) -> None:
        """Answer a message, or queue it for the scheduler."""
        if isinstance(message, RouterHello) and (why := _why_refused(router, message)):
            self._refused[router] = None
            if len(self._refused) > MAX_REMEMBERED_ROUTERS:
                self._refused.popitem(last=False)
            self._outbox.send(router, Refused(why))
            return
        if isinstance(message, RouterHello):
            self._refused.pop(router, None)
        elif router in self._refused:
            return
        self._last_heard[router] = self._clock()
        match message:
            case RouterHello():
                log.event("router_joined", router=router)
                self._outbox.send(router, self.hello)
                self._relay.greet(router, resume=message.resume)
                self._queue(router, message)
            case Ping():
                self._outbox.send(router, Pong(message.seq, self._load(), self._cache_seq))
            case Drain(timeout_s):
                self._relay.drain(timeout_s)
            case SetRole(call_id, role, timeout_s):
                refusal = self._why_not(role)
                if not refusal:
                    self._relay.drain(timeout_s, role)
                self._outbox.send(router, Answered(call_id, not refusal, refusal))
            case Drained():
                self._relay.let_go(router)
                self._wake.set()
            case Relay():
                self._relay.relay(router, message)
            case _:
                self._queue(router, message)

    def _why_not(self, role: Role) -> str:
        """Why this node does not change to `role`; empty when it does."""
        if self.hello.fixed_role:
            return "it was started with --fixed-role"
        if role is self.hello.role:
            return f"it is a {role} node already"
        return "it is being removed" if self._relay.is_leaving else ""

    def _queue(self, router: str, message: RouterToNode) -> None:
        self._inbox.append(FromRouter(router, message))
        self._wake.set()

    # -------------------------------------------------------------------------- the scheduler thread
    def take_role(self) -> Role | None:
        """The role in which this node goes on now, since no router has work here any more. None: it stays."""
        return self._relay.take_role()

    def take(self) -> list[FromRouter]:
        """Everything that has come since the last call, in order. A key is dispatched once, whatever is repeated."""
        taken: list[FromRouter] = []
        while self._inbox:
            heard = self._inbox.popleft()
            match heard.message:
                case Decode(key) if not self._is_new(key, sends=False):
                    continue
                case Prefill(key) | Move(to_key=key) | Lend(key, work=Work()) if not self._is_new(
                    key, sends=True
                ):
                    continue
            taken.append(heard)
        return taken

    def _is_new(self, key: ReqKey, *, sends: bool) -> bool:
        if (key, sends) in self._dispatched:
            self._dispatch_repeated(key=key)
            return False
        self._dispatched[key, sends] = None
        if len(self._dispatched) > MAX_REMEMBERED_KEYS:
            self._dispatched.popitem(last=False)
        return True

    def say_tokens(self, entry: TokenEntry) -> None:
        """Queue tokens for the router of their request; `flush` sends them."""
        self._entries.setdefault(entry.key.router, []).append(entry)

    def fail(
        self, key: ReqKey, status: int, message: str, param: str | None = None, blames: str = ""
    ) -> None:
        """Tell the request's router that it failed, after the tokens it has had. Any message can be sent.

        What a client sent may be quoted in a message, with surrogates, which UTF-8 cannot encode.
        """
        self.flush()
        message = message.encode(errors="backslashreplace").decode()
        self._outbox.send(key.router, Failed(key, status, message, param, blames))

    def hand_back(self, key: ReqKey, reason: str) -> None:
        """Have the request's router send it to another node, behind the tokens that it has had."""
        self.flush()
        self._outbox.send(key.router, Failed(key, 503, reason, handed_back=True))

    def say(self, message: NotCached | Moved | RunsAlone) -> None:
        """Tell the router of a request what has become of it, behind the tokens that it has had."""
        self.flush()
        self._outbox.send(message.key.router, message)

    def flush(self) -> None:
        """Send the tokens of this step, one message to each router."""
        for router, entries in self._entries.items():
            self._outbox.send(router, Tokens(tuple(entries)))
        self._entries.clear()

    def tell_unreachable(self) -> None:
        """Send the node's load at once, not with the next ping, when other nodes than before are unreachable."""
        load = self._load()
        if load.unreachable.keys() == self._unreachable:
            return
        self._unreachable = set(load.unreachable)
        for router in list(self._last_heard):
            self._outbox.send(router, Pong(0, load, self._cache_seq))

    @property
    def is_draining(self) -> bool:
        """Whether this node is to be emptied."""
        return self._relay.is_draining

    def drain(self, timeout_s: float) -> None:
        """Tell every router that this process ends when its requests have left it, or after `timeout_s`."""
        self._relay.drain(timeout_s, stops=True)

    def want_moved(self, keys: Iterable[ReqKey]) -> None:
        """Ask the router of each request to move it to another node."""
        by_router: dict[str, list[ReqKey]] = {}
        for key in keys:
            by_router.setdefault(key.router, []).append(key)
        for router, of_router in by_router.items():
            self._outbox.send(router, MoveWanted(tuple(of_router)))

    def tell_all(self, events: CacheEvents) -> None:
        """Send events to every router that follows them."""
        for router in self._followers:
            self._outbox.send(router, events)
        self._cache_seq = events.seq  # not before they are queued: a Pong never runs ahead of them

    def tell(self, router: str, events: CacheEvents) -> None:
        """Send all there is to one router, which follows what comes from now on until it falls silent."""
        self._followers[router] = None
        self._outbox.send(router, events)
        self._cache_seq = events.seq

    def answer(self, router: str, call_id: int, ok: bool, detail: str = "") -> None:
        """Answer a call."""
        self._outbox.send(router, Answered(call_id, ok, detail))

    def take_silent(self, timeout_s: float) -> set[str]:
        """Routers that have said nothing for `timeout_s`; each is named once, until it speaks again."""
        now = self._clock()
        silent = {router for router, heard in list(self._last_heard.items()) if now - heard > timeout_s}
        for router in silent:
            self.forget(router)
        return silent

    def forget(self, router: str) -> None:
        """Send nothing more to a router, until it speaks again."""
        self._last_heard.pop(router, None)
        self._followers.pop(router, None)

    def leave(self, reason: str, *, crashed: bool = False) -> None:
        """Tell every router that this node goes away; with `crashed`, by an error."""
        self.flush()
        for router in list(self._last_heard):
            self._outbox.send(router, Leaving(reason, crashed))


def _why_refused(router: str, hello: RouterHello) -> str:
    """Why this node does not work with a router; empty when it does."""
    if hello.router != router:
        return f"router: {hello.router!r} dialled as {router!r}"
    return other_version("router", hello.version)
