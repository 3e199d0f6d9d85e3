"""Strangers at the port of tcp links, and what TLS refuses."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
import torch

from shared.device_threads import DeviceThreads
from shared.errors import ConfigError
from shared.kvtransfer.transports.choice import make_transports
from shared.kvtransfer.transports.kv_port import HELLO_NBYTES, MAGIC, MAX_STRANGERS, Acceptor
from shared.kvtransfer.transports.tcp import notice_vanished
from shared.kvtransfer.transports.tls import Identity, secured
from shared.protocol.messages import Struct
from shared.protocol.transfer_messages import StoreSet
from tests.patience import PATIENCE_S, until
from tests.processes import free_port
from tests.unit.kvtransfer.link_pair import (
    CPU,
    LinkPair,
    num_descriptors,
    num_threads,
    real,
    transports,
)
from tests.unit.kvtransfer.test_gloo import listening_ports

torch.set_num_threads(1)

HELLO = MAGIC + bytes(HELLO_NBYTES - len(MAGIC))


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), DeviceThreads())
    yield acceptor
    acceptor.close()


def connect(address: tuple[str, int], said: bytes = b"") -> socket.socket:
    sock = socket.create_connection(address, PATIENCE_S)
    sock.sendall(said)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Waits until it is."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n" * 3, HELLO, HELLO + b"more", MAGIC + b"\xff" * 32],
)
def test_what_is_no_expected_hello_is_closed(acceptor: Acceptor, said: bytes) -> None:
    with acceptor.expecting(MAGIC + b"\x01" * 32) as arriving, connect(acceptor.address, said) as stranger:
        assert is_closed(stranger)
        assert not arriving.done()


def test_a_hello_admits_one_connection_and_what_follows_it_is_the_links(acceptor: Acceptor) -> None:
    with acceptor.expecting(HELLO) as arriving, connect(acceptor.address, HELLO[:9]) as peer:
        peer.sendall(HELLO[9:] + b"the link")
        with arriving.result(PATIENCE_S) as accepted, connect(acceptor.address, HELLO) as replay:
            assert is_closed(replay)
            accepted.setblocking(True)
            assert accepted.recv(100) == b"the link"


def test_a_connection_that_comes_for_a_link_that_was_given_up_is_closed(acceptor: Acceptor) -> None:
    def give_up(sock: socket.socket) -> None:
        with acceptor.expecting(HELLO) as arriving:
            sock.sendall(HELLO)
            arriving.result(PATIENCE_S)
            raise ValueError("given up")

    with connect(acceptor.address) as peer:
        with pytest.raises(ValueError, match="given up"):
            give_up(peer)
        assert is_closed(peer)
    with connect(acceptor.address, HELLO) as late:
        assert is_closed(late)


def test_silent_strangers_are_bounded_and_keep_no_place_from_a_peer(acceptor: Acceptor) -> None:
    before = num_descriptors()
    strangers = [connect(acceptor.address, MAGIC[: number % 8]) for number in range(500)]
    with acceptor.expecting(HELLO) as arriving, connect(acceptor.address, HELLO):
        arriving.result(PATIENCE_S).close()
    until(lambda: num_descriptors() <= before + len(strangers) + MAX_STRANGERS)
    assert all(is_closed(stranger) for stranger in strangers[:-MAX_STRANGERS])
    for stranger in strangers:
        stranger.close()
    until(lambda: num_descriptors() <= before)


def test_a_stranger_that_says_nothing_is_closed_in_time() -> None:
    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), DeviceThreads(), hello_timeout_s=0.1)
    with connect(acceptor.address, MAGIC) as first, connect(acceptor.address) as second:
        assert is_closed(first)
        assert is_closed(second)
    acceptor.close()


@pytest.mark.parametrize("backend", ["tcp", "tls"])
def test_links_are_built_between_strangers_over_one_port(backend: str) -> None:
    threads = num_threads()
    pair = LinkPair(real(backend))
    pair.until(pair.linked)
    (port,) = listening_ports(but=pair.receiving.port)
    strangers = [connect(("127.0.0.1", port)) for _ in range(2 * MAX_STRANGERS)]
    for number in range(5):
        pair.p.on_disconnected("d0", "test")
        pair.p.on_connected("d0")
        pair.until_opened(number + 2)
        pair.until(pair.linked)
        pair.moves_pages(number)
        strangers += [
            connect(("127.0.0.1", port), HELLO) for port in listening_ports(but=pair.receiving.port)
        ]
    pair.close()
    for stranger in strangers:
        stranger.close()
    assert listening_ports() == []
    until(lambda: num_threads() <= threads)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = replace(real("tcp"), kv_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--kv-port {options.kv_port}: .*in use"):
            make_transports(options, CPU)


def test_a_port_that_another_node_takes_later_is_named_by_the_link() -> None:
    port = free_port()
    decode = transports(replace(real("tcp"), kv_port=port))
    with socket.create_server(("127.0.0.1", port)):
        cannot_be_built(LinkPair(real("tcp"), d_transports=decode), f"--kv-port {port}: 127.0.0.1 cannot be")
    pair = LinkPair(real("tcp"), d_transports=decode)
    pair.until(pair.linked)
    assert listening_ports(but=pair.receiving.port) == [port]
    pair.close()


# ------------------------------------------------------------------------------------------- TLS
def cannot_be_built(pair: LinkPair, reason: str) -> None:
    """An attempt fails with a `reason`, and none succeeds before. Which end's reason both report is chance."""

    def reasons() -> str:
        return str({**pair.p.unreachable, **pair.d.unreachable})

    try:
        pair.until(lambda: pair.linked() or reason in reasons())
        assert reason in reasons()
    finally:
        pair.close()


def told_instead(certificate: bytes) -> Callable[[Struct], Struct]:
    """On its way, the receiver's certificate is replaced."""

    def tamper(message: Struct) -> Struct:
        if isinstance(message, StoreSet) and message.name == "tls/0":
            return msgspec.structs.replace(message, value=certificate)
        return message

    return tamper


def test_another_certificate_than_was_told_makes_no_link() -> None:
    pair = LinkPair(real("tls"), tamper=told_instead(Identity().certificate))
    cannot_be_built(pair, "CERTIFICATE_VERIFY_FAILED")


@contextlib.contextmanager
def shaking(theirs: bytes, identity: Identity) -> Iterator[tuple[socket.socket, Future[None]]]:
    """A peer's socket, and what comes of shaking hands as the end that has accepted it. The peer may be anything."""
    near, far = socket.socketpair()
    near.settimeout(PATIENCE_S)
    with far, ThreadPoolExecutor(1) as executor:
        yield far, executor.submit(lambda: secured(near, identity, theirs, accepted=True).close())


def plain(far: socket.socket) -> None:
    far.sendall(bytes(64))


def old_tls(far: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):  # noqa: PT011 - an alert, or the end of the connection
        context.wrap_socket(far)


def no_certificate(far: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.wrap_socket(far).close()


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (plain, "WRONG_VERSION_NUMBER|record layer|HTTP|packet"),
        (old_tls, "UNSUPPORTED_PROTOCOL"),
        (no_certificate, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (socket.socket.close, "EOF"),
    ],
)
def test_what_is_no_mutual_tls_1_3_fails_the_handshake(
    peer: Callable[[socket.socket], None], reason: str
) -> None:
    with shaking(Identity().certificate, Identity()) as (far, outcome):
        peer(far)
        with pytest.raises(OSError, match=reason):
            outcome.result(PATIENCE_S)


def test_two_ends_that_were_told_each_other_shake_hands_over_tls_1_3() -> None:
    ours, theirs = Identity(), Identity()
    with (
        shaking(theirs.certificate, ours) as (far, outcome),
        secured(far, theirs, ours.certificate, accepted=False) as tls,
    ):
        assert tls.version() == "TLSv1.3"
        outcome.result(PATIENCE_S)


@pytest.mark.parametrize("timeout_s", [2, 2.9, 3, 4, 5, 7, 8, 10, 600])
def test_a_host_that_vanishes_is_noticed_in_time(timeout_s: float) -> None:
    """Linux looks at the time since the last answer whenever a probe is due, and sends one if it is not over."""
    with socket.socket() as sock:
        notice_vanished(sock, timeout_s)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")
        idle_s, interval_s, over_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
        )
    due_s, num_sent = idle_s, 0
    while not num_sent or 1000 * due_s < over_ms:
        due_s, num_sent = due_s + interval_s, num_sent + 1
    assert timeout_s - 1 < due_s <= timeout_s and num_sent <= 2


def test_a_short_message_does_not_wait_for_the_answer_to_the_one_before() -> None:
    with socket.socket() as sock:
        notice_vanished(sock, 10)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
