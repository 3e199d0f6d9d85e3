"""A node's side of its routers, with a recording outbox and a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Answered,
    CacheEvents,
    CacheResync,
    Cancel,
    Drain,
    Drained,
    Draining,
    Failed,
    Finish,
    Flush,
    KVLayout,
    Leaving,
    Load,
    NodeHello,
    NodeLimits,
    NodeRef,
    Ping,
    Pong,
    Refused,
    ReqKey,
    ReqReport,
    Role,
    RouterHello,
    SetRole,
    Stop,
    Struct,
    TokenEntry,
    Tokens,
)
from shared.protocol.router_port import MAX_REMEMBERED_ROUTERS, FromRouter, RouterPort

HELLO = NodeHello(
    NodeRef("p0", "p0#1", "tcp://127.0.0.1:7100"),
    Role.PREFILL,
    KVLayout("f", "float32", 16, 1, 1, 8),
    NodeLimits(64, 640, 8),
    {"page_size": 16},
    PROTOCOL_VERSION,
)


class RecordingOutbox:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Struct]] = []

        self.before: Callable[[], None] | None = None
        """What another thread does just before the next message is queued."""

    def send(self, to: str, message: Struct) -> None:
        if self.before is not None:
            before, self.before = self.before, None
            before()
        self.sent.append((to, message))

    def take(self) -> list[tuple[str, Struct]]:
        taken, self.sent = self.sent, []
        return taken


class Rig:
    def __init__(self) -> None:
        self.outbox = RecordingOutbox()
        self.now = 100.0
        self.load = Load(progress=1)
        self.wake = threading.Event()
        self.port = RouterPort(self.outbox, HELLO, lambda: self.load, self.wake, lambda: self.now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def key(rid: str, router: str = "one") -> ReqKey:
    return ReqKey(router, rid)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2])
def test_a_router_of_a_version_that_is_not_spoken_is_refused(rig: Rig, version: int) -> None:
    rig.port.on_message("one", RouterHello("one", version))
    ((to, refused),) = rig.outbox.take()
    assert to == "one"
    assert isinstance(refused, Refused)
    assert (
        f"the router speaks version {version or 1}, and this end version {PROTOCOL_VERSION}" in refused.reason
    )
    assert rig.port.take() == []


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_a_router_of_this_version_or_the_one_beside_it_is_greeted(rig: Rig, version: int) -> None:
    """The scheduler hears of it too, since a greeting ends what came before."""
    rig.port.on_message("one", RouterHello("one", version))
    assert rig.outbox.take() == [("one", HELLO)]
    assert rig.port.take() == [FromRouter("one", RouterHello("one", version))]
    assert rig.wake.is_set()


def test_nothing_of_a_refused_router_counts_until_it_is_greeted(rig: Rig) -> None:
    """A change of the node's role would wait for it else."""
    rig.port.on_message("good", RouterHello("good", PROTOCOL_VERSION))
    rig.port.on_message("one", RouterHello("one", PROTOCOL_VERSION - 2))
    rig.port.on_message("one", SetRole(1, Role.DECODE, 0.0))
    assert not rig.port.is_draining
    rig.port.on_message("good", SetRole(2, Role.DECODE, 0.0))
    rig.port.on_message("good", Drained())
    assert rig.port.take_role() is Role.DECODE
    rig.port.on_message("one", RouterHello("one", PROTOCOL_VERSION))
    assert rig.port.take_role() is None, "now it has to let the node go too"
    rig.port.on_message("one", Drained())
    assert rig.port.take_role() is Role.DECODE


def test_the_oldest_of_many_refused_routers_is_forgotten(rig: Rig) -> None:
    for number in range(MAX_REMEMBERED_ROUTERS + 1):
        rig.port.on_message(f"r{number}", RouterHello(f"r{number}", PROTOCOL_VERSION - 2))
    rig.outbox.take()
    for router in ("r0", "r1", f"r{MAX_REMEMBERED_ROUTERS}"):
        rig.port.on_message(router, Ping(1))
    assert [to for to, _ in rig.outbox.take()] == ["r0"]


def test_a_router_under_another_name_is_refused(rig: Rig) -> None:
    rig.port.on_message("one", RouterHello("two", PROTOCOL_VERSION))
    ((to, refused),) = rig.outbox.take()
    assert to == "one"
    assert isinstance(refused, Refused)
    assert "'two' dialled as 'one'" in refused.reason


def test_pings_are_answered_at_once_with_the_load_of_the_moment(rig: Rig) -> None:
    """The scheduler may be in the middle of a long step: nobody calls `take` here."""
    rig.port.on_message("one", Ping(3))
    rig.load = Load(progress=2)
    rig.port.on_message("two", Ping(4))
    assert rig.outbox.take() == [("one", Pong(3, Load(progress=1))), ("two", Pong(4, Load(progress=2)))]
    assert rig.port.take() == []
    assert not rig.wake.is_set()


def test_a_link_that_goes_or_comes_is_told_at_once_and_once(rig: Rig) -> None:
    for router in ("one", "two"):
        rig.port.on_message(router, Ping(1))
    rig.outbox.take()
    rig.port.tell_unreachable()
    assert rig.outbox.take() == []
    for unreachable in ({"p0#1": "silent for 5 s"}, {}):
        rig.load = Load(unreachable=unreachable)
        rig.port.tell_unreachable()
        assert rig.outbox.take() == [("one", Pong(0, rig.load)), ("two", Pong(0, rig.load))]
        rig.load = Load(unreachable=dict.fromkeys(unreachable, "something else"))
        rig.port.tell_unreachable()
        assert rig.outbox.take() == []


def test_requests_wait_for_the_scheduler_in_order_and_wake_it(rig: Rig) -> None:
    messages = [Cancel(key("a")), Flush(1), Stop(key("b"), 3)]
    for i, message in enumerate(messages):
        rig.port.on_message(f"r{i}", message)
    assert rig.wake.is_set()
    assert rig.outbox.take() == []
    assert rig.port.take() == [FromRouter(f"r{i}", message) for i, message in enumerate(messages)]
    assert rig.port.take() == []


def test_the_tokens_of_a_step_are_one_message_to_each_router(rig: Rig) -> None:
    report = ReqReport(cached_tokens=4)
    rig.port.say_tokens(TokenEntry(key("a"), 0, (5,), None, report))
    rig.port.say_tokens(TokenEntry(key("b", "two"), 7, (6,)))
    rig.port.say_tokens(TokenEntry(key("c"), 2, (), Finish("length")))
    assert rig.outbox.take() == [], "nothing leaves before the flush"
    rig.port.flush()
    assert rig.outbox.take() == [
        (
            "one",
            Tokens(
                (TokenEntry(key("a"), 0, (5,), None, report), TokenEntry(key("c"), 2, (), Finish("length")))
            ),
        ),
        ("two", Tokens((TokenEntry(key("b", "two"), 7, (6,)),))),
    ]
    rig.port.flush()
    assert rig.outbox.take() == [], "a step without tokens says nothing"


def test_a_failure_is_sent_whatever_it_quotes(rig: Rig) -> None:
    """A message that cannot be encoded would end the scheduler."""
    rig.port.fail(key("a"), 400, "'not' at #/properties/\ud83d is \N{PILE OF POO}")
    ((_, failed),) = rig.outbox.take()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=Failed) == failed
    assert isinstance(failed, Failed)
    assert failed.message == "'not' at #/properties/\\ud83d is \N{PILE OF POO}"


def test_a_failure_follows_the_tokens_before_it(rig: Rig) -> None:
    rig.port.say_tokens(TokenEntry(key("a"), 0, (5,)))
    rig.port.fail(key("a"), 503, "the pages are corrupt", blames="p0#1")
    first, second = rig.outbox.take()
    assert first == ("one", Tokens((TokenEntry(key("a"), 0, (5,)),)))
    assert second == ("one", Failed(key("a"), 503, "the pages are corrupt", None, "p0#1"))


def test_a_flush_is_answered_to_who_asked(rig: Rig) -> None:
    rig.port.answer("two", 9, ok=False)
    assert rig.outbox.take() == [("two", Answered(9, ok=False))]


def test_a_silent_router_is_named_once(rig: Rig) -> None:
    rig.port.on_message("one", Ping(1))
    rig.now += 6
    rig.port.on_message("two", Ping(1))
    assert rig.port.take_silent(10) == set()
    rig.now += 4
    assert rig.port.take_silent(10) == set(), "ten seconds are not more than ten"
    rig.now += 1
    assert rig.port.take_silent(10) == {"one"}
    assert rig.port.take_silent(10) == set()
    rig.now += 100
    assert rig.port.take_silent(10) == {"two"}


def test_any_message_is_a_sign_of_life(rig: Rig) -> None:
    rig.port.on_message("one", RouterHello("one", PROTOCOL_VERSION))
    rig.now += 9
    rig.port.on_message("one", Cancel(key("a")))
    rig.now += 9
    assert rig.port.take_silent(10) == set()


def test_a_router_that_left_is_not_silent(rig: Rig) -> None:
    for router in ("one", "two"):
        rig.port.on_message(router, Ping(1))
    rig.port.forget("one")
    rig.now += 11
    assert rig.port.take_silent(10) == {"two"}


def test_a_router_that_speaks_again_can_fall_silent_again(rig: Rig) -> None:
    rig.port.on_message("one", Ping(1))
    rig.now += 11
    assert rig.port.take_silent(10) == {"one"}
    rig.port.on_message("one", Ping(2))
    rig.now += 11
    assert rig.port.take_silent(10) == {"one"}


def test_every_router_is_told_that_the_node_leaves(rig: Rig) -> None:
    for router in ("one", "two", "silent"):
        rig.port.on_message(router, Ping(1))
    rig.now += 11
    for router in ("one", "two"):
        rig.port.on_message(router, Ping(2))
    rig.port.take_silent(10)
    rig.outbox.take()
    rig.port.say_tokens(TokenEntry(key("a"), 0, (5,)))
    rig.port.leave("maintenance")
    assert rig.outbox.take() == [
        ("one", Tokens((TokenEntry(key("a"), 0, (5,)),))),
        ("one", Leaving("maintenance")),
        ("two", Leaving("maintenance")),
    ]


ALL = CacheEvents(3, (1, 2), (), reset=True)
MORE = CacheEvents(4, (5,), (2,))


def test_a_router_hears_of_the_cache_after_what_the_node_is(rig: Rig) -> None:
    """The scheduler thread tells of a step just when the control thread is about to answer the greeting."""
    rig.outbox.before = lambda: rig.port.tell_all(MORE)
    rig.port.on_message("one", RouterHello("one", PROTOCOL_VERSION))
    rig.port.tell_all(MORE)
    assert rig.outbox.take() == [("one", HELLO)], "it does not know yet what these events follow"
    (heard,) = rig.port.take()
    rig.port.tell(heard.router, ALL)
    rig.port.tell_all(MORE)
    assert rig.outbox.take() == [("one", ALL), ("one", MORE)]


def test_who_was_refused_or_only_pings_hears_nothing_of_the_cache(rig: Rig) -> None:
    rig.port.on_message("one", RouterHello("two", PROTOCOL_VERSION))
    rig.port.on_message("two", Ping(1))
    rig.port.take()
    rig.outbox.take()
    rig.port.tell_all(MORE)
    assert rig.outbox.take() == []


def test_a_silent_router_is_told_of_the_cache_again_when_it_asks(rig: Rig) -> None:
    for router in ("one", "two"):
        rig.port.on_message(router, RouterHello(router, PROTOCOL_VERSION))
        rig.port.tell(router, ALL)
    rig.now += 11
    rig.port.on_message("two", Ping(1))
    assert rig.port.take_silent(10) == {"one"}
    rig.outbox.take()
    rig.port.tell_all(MORE)
    assert rig.outbox.take() == [("two", MORE)]
    rig.port.on_message("one", Ping(2))  # it was only asleep, and sees that it has missed something
    assert rig.outbox.take() == [("one", Pong(2, rig.load, MORE.seq))]
    rig.port.on_message("one", CacheResync())
    rig.port.tell("one", CacheEvents(4, (1, 5), (), reset=True))
    rig.outbox.take()
    rig.port.tell_all(CacheEvents(5, (), (1,)))
    assert {to for to, _ in rig.outbox.take()} == {"one", "two"}


def test_a_pong_never_runs_ahead_of_the_events(rig: Rig) -> None:
    """Else a router that has missed nothing would ask for everything."""
    rig.port.on_message("one", Ping(1))
    assert rig.outbox.take() == [("one", Pong(1, rig.load, None))]
    rig.port.tell("one", ALL)
    rig.outbox.take()
    rig.outbox.before = lambda: rig.port.on_message("one", Ping(2))
    rig.port.tell_all(MORE)
    rig.port.on_message("one", Ping(3))
    assert rig.outbox.take() == [
        ("one", Pong(2, rig.load, ALL.seq)),
        ("one", MORE),
        ("one", Pong(3, rig.load, MORE.seq)),
    ]


@pytest.mark.parametrize(
    ("role", "fixed", "leaving", "words"),
    [
        (Role.DECODE, False, False, ""),
        (Role.DECODE, True, False, "it was started with --fixed-role"),
        (Role.PREFILL, False, False, "it is a prefill node already"),
        (Role.DECODE, False, True, "it is being removed"),
    ],
)
def test_another_role_is_taken_or_refused(
    rig: Rig, role: Role, fixed: bool, leaving: bool, words: str
) -> None:
    rig.port.hello = msgspec.structs.replace(HELLO, fixed_role=fixed)
    rig.port.on_message("one", RouterHello("one", PROTOCOL_VERSION))
    if leaving:
        rig.port.on_message("one", Drain(60.0))
    rig.outbox.take()
    rig.port.on_message("one", SetRole(7, role, 60.0))
    told = [] if words else [("one", Draining(60.0, role=role))]
    assert rig.outbox.take() == [*told, ("one", Answered(7, not words, words))]
    rig.wake.clear()
    rig.port.on_message("one", Drained())
    assert rig.wake.is_set()
    assert rig.port.take_role() == (None if words else role)
