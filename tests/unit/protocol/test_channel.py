"""ControlThread over real loopback sockets."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from shared.errors import ConfigError
from shared.log import LimitedWarning
from shared.protocol.channel import ControlThread
from shared.protocol.dial_socket import LOST, MAX_FRAME_BYTES
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Flush,
    Leaving,
    Ping,
    Pong,
    Prefill,
    ReqKey,
    RouterHello,
    Work,
)
from shared.protocol.messages import Load as NodeLoad
from shared.protocol.resolver import Resolver
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.security import FleetKey
from shared.protocol.transfer_messages import PeerPing
from tests.patience import PATIENCE_S, until
from tests.unit.protocol.conftest import MakeParty, Party, SlowNames

PONG = Pong(7, NodeLoad())


@pytest.fixture
def node(party: MakeParty) -> Party:
    return party("node")


@pytest.fixture
def router(party: MakeParty) -> Party:
    return party("router-1").start()


@contextlib.contextmanager
def raw_dial(address: str, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A connection of a process that calls itself `identity`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 1000
        raw.rcvtimeo = 10_000
        raw.identity = identity
        raw.connect(address)
        yield raw


def test_typed_messages_both_ways(node: Party, router: Party) -> None:
    router.dial("n", node.listen())
    router.send("n", Cancel(ReqKey("router-1", "a", 2)))
    assert node.hear() == ("router-1", Cancel(ReqKey("router-1", "a", 2)))
    node.send("router-1", PONG)
    assert router.hear() == ("n", PONG)
    assert router.connected.get(timeout=PATIENCE_S) == "n"


def test_a_timer_runs_again_and_again_and_outlives_a_failure(node: Party) -> None:
    ran: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run() -> None:
        ran.put(1)
        raise ValueError("of the test")

    node.listen()
    node.control.every(0.01, run)
    for _ in range(3):
        assert ran.get(timeout=PATIENCE_S)


def test_messages_keep_their_order(node: Party, router: Party) -> None:
    router.dial("n", node.listen())
    for i in range(3000):
        router.send("n", Ping(i))
    assert [node.hear()[1].seq for _ in range(3000)] == list(range(3000))


def test_two_diallers_are_told_apart(node: Party, router: Party, party: MakeParty) -> None:
    address, other = node.listen(), party("router-2").start()
    router.dial("n", address)
    other.dial("n", address)
    router.send("n", Ping(1))
    other.send("n", Ping(2))
    assert {node.hear(), node.hear()} == {("router-1", Ping(1)), ("router-2", Ping(2))}
    node.send("router-2", Leaving("for two"))
    node.send("router-1", Leaving("for one"))
    assert router.hear()[1] == Leaving("for one")
    assert other.hear()[1] == Leaving("for two")


def test_peers_that_have_been_silent_longest_are_forgotten(party: MakeParty) -> None:
    node = party("n", max_diallers=2)
    address = node.listen()
    routers = [party(f"router-{i}").start() for i in range(3)]
    for router in routers:
        router.dial("n", address)
    for i in (0, 1, 0, 2):
        routers[i].send("n", Ping(i))
        assert node.hear() == (f"router-{i}", Ping(i))
    for i in range(3):
        node.send(f"router-{i}", Pong(i, NodeLoad()))
    assert routers[0].hear() == ("n", Pong(0, NodeLoad()))
    assert routers[2].hear() == ("n", Pong(2, NodeLoad()))
    routers[1].send("n", Ping(9))  # it is met anew
    assert node.hear() == ("router-1", Ping(9))
    node.send("router-1", PONG)
    assert routers[1].hear() == ("n", PONG)


def test_who_dials_before_admission_waits(node: Party, router: Party) -> None:
    address = node.listen(admit=False)
    router.dial("n", address)
    router.send("n", Ping(1))
    assert router.connected.get(timeout=PATIENCE_S) == "n"
    assert node.heard.empty()
    node.admit()
    assert node.hear() == ("router-1", Ping(1))


def test_a_peer_that_closes_is_reported_once(node: Party, router: Party) -> None:
    router.dialled("n", node.listen())
    node.close()
    assert router.disconnected.get(timeout=PATIENCE_S) == ("n", "connection closed")
    router.send("n", Ping(1))  # nobody there: dropped
    assert router.disconnected.empty()


def test_a_lost_connection_is_never_taken_up_again(node: Party, router: Party, party: MakeParty) -> None:
    """Another process at the same address would get messages that were meant for the dead one."""
    address = node.listen()
    router.dialled("n", address)
    node.close()
    router.disconnected.get(timeout=PATIENCE_S)
    successor = party("successor")
    assert successor.listen(int(address.rsplit(":", 1)[1])) == address
    router.send("n", Ping(1))
    with pytest.raises(queue.Empty):
        successor.heard.get(timeout=0.5)  # ZMQ by itself would have reconnected after 0.1 s
    router.dialled("n-again", address)
    router.send("n-again", Ping(2))
    assert successor.hear() == ("router-1", Ping(2))


def test_hanging_up_is_no_disconnection(node: Party, router: Party) -> None:
    address = node.listen()
    router.dialled("n", address)
    router.control.hang_up("n")
    router.control.hang_up("n")
    router.send("n", Ping(1))
    router.dialled("n", address)
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    assert router.disconnected.empty()


def test_dialling_again_replaces_the_connection(node: Party, router: Party) -> None:
    address = node.listen()
    router.dialled("n", address)
    router.send("n", Ping(1))
    node.hear()
    router.dialled("n", address)
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    node.send("router-1", PONG)
    assert router.hear() == ("n", PONG)
    assert router.disconnected.empty()


def test_two_nodes_that_dial_each_other_have_two_connections(party: MakeParty) -> None:
    a, b = party("a"), party("b")
    at_a, at_b = a.listen(), b.listen()
    a.dialled("b", at_b)
    b.dialled("a", at_a)
    a.control.to_dialled.send("b", Ping(1))
    b.control.to_dialled.send("a", Ping(2))
    assert (a.hear(), b.hear()) == (("b", Ping(2)), ("a", Ping(1)))
    # A dialler does not read what the node that it dialled reads: a message that took the wrong way would be lost.
    a.control.to_diallers.send("b", PONG)
    b.control.to_diallers.send("a", PONG)
    assert (a.hear(), b.hear()) == (("b", PONG), ("a", PONG))
    a.control.hang_up("b")
    a.control.to_dialled.send("b", Ping(3))
    a.control.to_diallers.send("b", PONG)
    assert b.hear() == ("a", PONG)


def test_every_dial_has_an_identity_of_its_own(router: Party) -> None:
    """A server that still holds the old connection would refuse a second one under the same identity."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        server.rcvtimeo = 10_000
        address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        for number in (b"1", b"2"):
            router.dialled("n", address)
            router.send("n", Ping(1))
            assert server.recv_multipart()[0] == b"router|router-1|" + number


def test_an_older_dial_of_the_same_peer_is_not_heard_any_more(node: Party) -> None:
    address = node.listen()
    with raw_dial(address, b"router|raw|9") as older, raw_dial(address, b"router|raw|10") as newer:
        older.send(msgspec.msgpack.encode(Ping(1)))
        assert node.hear() == ("raw", Ping(1))
        newer.send(msgspec.msgpack.encode(Ping(2)))
        assert node.hear() == ("raw", Ping(2))
        older.send(msgspec.msgpack.encode(Ping(3)))
        with pytest.raises(queue.Empty):
            node.heard.get(timeout=0.2)
        node.send("raw", PONG)
        assert newer.recv() == msgspec.msgpack.encode(PONG)


def test_a_kind_that_nobody_expects_is_ignored(node: Party, router: Party, party: MakeParty) -> None:
    address, stranger = node.listen(), party("stranger").start()
    stranger.dial("n", address, kind="prefill")
    assert stranger.connected.get(timeout=PATIENCE_S) == "n"
    stranger.send("n", Ping(1))
    router.dial("n", address)
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    assert node.heard.empty()


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b""],
        [msgspec.msgpack.encode(["NoSuchMessage", 1])],
        [msgspec.msgpack.encode(PeerPing(1))],
        [msgspec.msgpack.encode(["Ping", "one"])],
        [b"\x92\xabRouterHello\xa2\xff\xfe"],
        [b"\x93\xa4Ping\x01" + b"\x91" * 50_000 + b"\x00"],
        [msgspec.msgpack.encode(Ping(1)), b"a second frame"],
    ],
    ids=[
        "garbage",
        "empty",
        "unknown tag",
        "another union",
        "wrong type",
        "not UTF-8",
        "nested without end",
        "two frames",
    ],
)
def test_what_is_no_message_is_ignored(node: Party, frames: list[bytes]) -> None:
    address = node.listen()
    with raw_dial(address, b"router|raw|1") as raw:
        raw.send_multipart(frames)
        raw.send(msgspec.msgpack.encode(Ping(2)))
        assert node.hear() == ("raw", Ping(2))
    assert node.heard.empty()


@pytest.mark.parametrize(
    "identity", [b"router", b"router|", b"router||1", b"\xff\xfe", b"|raw|1", b"router|raw|x"]
)
def test_an_identity_without_a_peer_is_ignored(node: Party, router: Party, identity: bytes) -> None:
    address = node.listen()
    with raw_dial(address, identity) as raw:
        raw.send(msgspec.msgpack.encode(Ping(1)))
        raw.send(b"")
    router.dial("n", address)
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    assert node.heard.empty()


def test_strangers_do_not_fill_the_log(node: Party, caplog: pytest.LogCaptureFixture) -> None:
    address = node.listen()
    with raw_dial(address, b"stranger") as raw:
        for _ in range(200):
            raw.send(b"")
        known = Party("router-1", None).start()
        known.dial("n", address)
        known.send("n", Ping(1))
        assert node.hear() == ("router-1", Ping(1))
        known.close()
    assert caplog.text.count("stranger_ignored") <= LimitedWarning.LIMIT


def test_messages_to_an_unknown_peer_are_dropped(
    node: Party, router: Party, caplog: pytest.LogCaptureFixture
) -> None:
    address = node.listen()
    node.send("router-1", PONG)
    router.dial("n", address)
    router.send("n", Ping(1))
    node.hear()
    node.send("router-2", PONG)
    node.send("router-1", Leaving("bye"))
    assert router.hear() == ("n", Leaving("bye"))
    assert "control_error" not in caplog.text


def test_a_dialler_that_is_gone_does_not_disturb_the_others(
    node: Party, router: Party, party: MakeParty
) -> None:
    address, other = node.listen(), party("router-2").start()
    for dialler in (router, other):
        dialler.dial("n", address)
        dialler.send("n", RouterHello(dialler.name, PROTOCOL_VERSION))
    node.hear(), node.hear()
    other.close()
    for _ in range(50):
        node.send("router-2", PONG)
    node.send("router-1", PONG)
    assert router.hear() == ("n", PONG)


def test_what_was_sent_before_close_arrives(node: Party, router: Party) -> None:
    router.dial("n", node.listen())
    router.send("n", RouterHello("router-1", PROTOCOL_VERSION))
    node.hear()
    node.send("router-1", Leaving("goodbye"))
    node.close()
    assert router.hear() == ("n", Leaving("goodbye"))


def test_a_message_after_close_is_dropped(node: Party) -> None:
    node.listen()
    node.close()
    node.send("router-1", PONG)


def test_a_handler_may_hang_up(node: Party, party: MakeParty) -> None:
    class Hasty(Party):
        def _on_message(self, peer: str, message: object) -> None:
            super()._on_message(peer, message)
            self.control.hang_up(peer)

    hasty = Hasty("router-1", None)
    try:
        hasty.start().dial("n", node.listen())
        hasty.send("n", Ping(1))
        node.hear()
        node.send("router-1", PONG)
        assert hasty.hear() == ("n", PONG)
        hasty.send("n", Ping(2))
        hasty.dial("n2", node.control._server.getsockopt_string(zmq.LAST_ENDPOINT))  # type: ignore[union-attr]
        hasty.send("n2", Flush(3))
        assert node.hear()[1] == Flush(3)
    finally:
        hasty.close()


@contextlib.contextmanager
def descriptor_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def dead_address() -> str:
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_a_dial_without_descriptors_is_reported_and_may_be_tried_again(node: Party, router: Party) -> None:
    address = node.listen()
    with open(os.devnull) as lowest_free:
        limit = lowest_free.fileno()
    with descriptor_limit(limit):
        router.dial("n", address)
        peer, reason = router.disconnected.get(timeout=PATIENCE_S)
    assert peer == "n"
    assert "Too many open files" in reason
    router.dialled("n", address)
    router.send("n", Ping(1))
    assert node.hear() == ("router-1", Ping(1))


def test_a_dial_that_is_refused_is_reported_and_leaves_nothing_open(router: Party) -> None:
    def dial_twenty() -> int:
        for i in range(20):
            router.dial(f"n{i}", dead_address())
        for _ in range(20):
            assert router.disconnected.get(timeout=PATIENCE_S)[1] == "connection refused"
        return len(os.listdir("/proc/self/fd"))

    before = dial_twenty()  # some of which are still being closed
    dial_twenty()
    assert not router.control._dialled
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_dial_that_is_not_answered_is_given_up(party: MakeParty) -> None:
    router = party("router-1", connect_timeout_s=0.2).start()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        router.dial("n", f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        peer, reason = router.disconnected.get(timeout=PATIENCE_S)
    assert peer == "n"
    assert "no answer within 0.2 s" in reason


def test_a_dial_that_is_lost_as_its_time_is_up_ends_once(party: MakeParty) -> None:
    """The control thread finds both when it was held up for so long."""
    router = party("router-1", connect_timeout_s=0.5).start()
    held_up, time_is_up = threading.Event(), threading.Event()

    def hold_up() -> None:
        held_up.set()
        assert time_is_up.wait(PATIENCE_S)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        router.dial("n", f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        dialled, _ = mute.accept()
        router.control.every(0.01, hold_up)
        assert held_up.wait(PATIENCE_S)
        dialled.close()
        time.sleep(0.5)
        time_is_up.set()
        assert router.disconnected.get(timeout=PATIENCE_S)[0] == "n"
        router.close()
    assert router.disconnected.empty()


def test_as_many_peers_as_a_router_has_members_can_be_dialled(node: Party, router: Party) -> None:
    """Each dial takes three sockets of ZMQ's, which has 1023 by default."""
    address = node.listen()
    with descriptor_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        for i in range(400):
            router.dial(f"n{i}", address)
        names = {router.connected.get(timeout=PATIENCE_S) for _ in range(400)}
        assert names == {f"n{i}" for i in range(400)}
        router.close()
        node.close()


def test_a_name_that_resolves_slowly_delays_no_other_peer(
    node: Party, party: MakeParty, names: SlowNames
) -> None:
    router = party("router-1", resolver=Resolver(names)).start()
    address = node.listen()
    router.dial("late", address.replace("127.0.0.1", "slow.example"))
    assert names.asked.get(timeout=PATIENCE_S) == "slow.example"
    for seq in (3, 4):
        router.send("late", Ping(seq))
    router.dialled("n", address)
    router.dialled("m", address.replace("127.0.0.1", "fast.example"))
    router.send("n", Ping(2))
    assert node.hear() == ("router-1", Ping(2))
    names.answers.set()
    assert router.connected.get(timeout=PATIENCE_S) == "late"
    assert [node.hear()[1], node.hear()[1]] == [Ping(3), Ping(4)], "what was said meanwhile has waited"


def test_a_name_is_looked_up_anew_for_every_dial(node: Party, party: MakeParty, names: SlowNames) -> None:
    router = party("router-1", resolver=Resolver(names)).start()
    address = node.listen().replace("127.0.0.1", "fast.example")
    router.dialled("n", address)
    router.dialled("n", address)
    assert [names.asked.get(timeout=PATIENCE_S) for _ in range(2)] == ["fast.example"] * 2


def test_a_name_without_an_address_is_said_to_be_the_reason(party: MakeParty, names: SlowNames) -> None:
    router = party("router-1", resolver=Resolver(names)).start()
    router.dial("n", "tcp://no.example:7200")
    peer, reason = router.disconnected.get(timeout=PATIENCE_S)
    assert peer == "n"
    assert "no.example does not resolve" in reason


def test_a_name_that_takes_too_long_is_said_to_be_the_reason(party: MakeParty, names: SlowNames) -> None:
    router = party("router-1", resolver=Resolver(names), connect_timeout_s=0.2).start()
    router.dial("n", "tcp://slow.example:7200")
    _, reason = router.disconnected.get(timeout=PATIENCE_S)
    assert "no answer within 0.2 s" in reason


@pytest.mark.parametrize(
    "address", ["nowhere", "tcp://host", "tcp://host:port", "tcp://:7200", "tcp://a\0b:1"]
)
def test_an_address_that_is_none_is_reported(router: Party, address: str) -> None:
    router.dial("n", address)
    assert "cannot be dialled" in router.disconnected.get(timeout=PATIENCE_S)[1]


@pytest.mark.parametrize("key", [None, FleetKey(b"secret of the fleet")], ids=["plain", "curve"])
def test_a_long_message_travels_in_several_frames(party: MakeParty, key: FleetKey | None) -> None:
    node, router = party("node", key), party("router-1", key).start()
    prompt = Prefill(ReqKey("router-1", "a"), Work(tuple(range(300_000)), SamplingParams()), None)
    assert len(msgspec.msgpack.encode(prompt)) > 10 * MAX_FRAME_BYTES
    router.dialled("n", node.listen())
    router.send("n", prompt)
    assert node.hear() == ("router-1", prompt)
    long = Leaving("x" * (MAX_FRAME_BYTES * 3))
    node.send("router-1", long)
    assert router.hear() == ("n", long)


def zmtp_greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_a_stranger_that_announces_a_large_frame_is_hung_up_on(party: MakeParty, mechanism: bytes) -> None:
    """Before it has proved anything, so that memory cannot be taken without the fleet's key."""
    node = party("node", FleetKey(b"secret of the fleet") if mechanism == b"CURVE" else None)
    port = int(node.listen().rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(zmtp_greeting(mechanism))
        received = 0
        while received < 64:
            received += len(stranger.recv(4096))
        stranger.sendall(b"\x06" + (150 << 20).to_bytes(8, "big"))  # a long command
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            stranger.sendall(bytes(32 << 20))  # more than the kernel buffers


def test_a_dialled_stranger_that_announces_a_large_frame_is_hung_up_on(router: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        router.dial("n", f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with server.accept()[0] as stranger:
            stranger.sendall(zmtp_greeting(b"NULL") + b"\x06" + (150 << 20).to_bytes(8, "big"))
            peer, reason = router.disconnected.get(timeout=PATIENCE_S)
    assert peer == "n"
    assert reason in LOST.values(), "and not because its time was up"


def test_a_stranger_that_never_ends_its_handshake_is_hung_up_on(party: MakeParty) -> None:
    port = int(party("n", connect_timeout_s=0.2).listen().rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        while stranger.recv(4096):
            pass  # the node's greeting, then the end of the connection


def test_a_taken_port_is_refused_with_its_name(node: Party, party: MakeParty) -> None:
    port = int(node.listen().rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        party("second").control.bind("127.0.0.1", port)


def test_an_unknown_host_is_refused_with_its_name(party: MakeParty) -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:0"):
        party("node").control.bind("no.such.host.invalid", 0)


def test_close_leaves_no_thread_and_no_descriptor(party: MakeParty) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    assert Path("/proc/self/fd").is_dir()
    warm = party("warm")
    warm.listen()
    warm.close()
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        node, router = party("node"), party("router-1").start()
        router.dialled("n", node.listen())
        router.send("n", Ping(1))
        node.hear()
        node.close()
        router.close()
    until(lambda: threading.active_count() == threads)
    until(lambda: descriptors() == before)


def test_close_before_start() -> None:
    ControlThread().close()
