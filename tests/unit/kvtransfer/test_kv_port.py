"""Strangers at the port of tcp links, and what TLS refuses."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError
from shared.kvtransfer.transports.choice import make_transports
from shared.kvtransfer.transports.kv_port import HELLO_NBYTES, MAGIC, MAX_STRANGERS, Acceptor
from shared.kvtransfer.transports.tcp import notice_vanished
from shared.kvtransfer.transports.tls import MadeIdentity, secured
from shared.protocol.messages import Struct
from shared.protocol.transfer_messages import StoreSet
from tests.patience import PATIENCE_S, until
from tests.processes import free_port
from tests.unit.kvtransfer.link_pair import (
    CPU,
    REAL,
    LinkPair,
    num_descriptors,
    num_threads,
    real,
    transports,
)
from tests.unit.kvtransfer.test_strangers import listening_ports

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
    [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"BatonKV0", HELLO, HELLO + b"more", MAGIC + b"\xff" * 32],
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


def test_a_stranger_that_leaves_when_its_time_is_up_is_closed_once() -> None:
    """Its time is over when the thread, which was held up, comes to it."""
    hello_timeout_s = 0.5
    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), DeviceThreads(), hello_timeout_s)
    before = num_descriptors()
    stranger = connect(acceptor.address)
    until(lambda: num_descriptors() >= before + 2, "it has been met")
    with acceptor._lock:  # the thread waits for it when the hello has come
        stranger.sendall(HELLO)
        time.sleep(2 * hello_timeout_s)
    with stranger, acceptor.expecting(MAGIC + b"\x01" * 32) as arriving:
        assert is_closed(stranger)
        with connect(acceptor.address, MAGIC + b"\x01" * 32), arriving.result(PATIENCE_S):
            pass
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
@dataclass(frozen=True)
class Signed:
    """A certificate, and its key to sign others with."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, by: Signed | None = None) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "the CA" if by is None else "a node")])
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        issuer = name if by is None else by.certificate.subject
        builder = x509.CertificateBuilder(
            issuer, name, key.public_key(), x509.random_serial_number(), now, now + day
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        return cls(key, builder.sign(key if by is None else by.key, hashes.SHA256()))

    def write(self, folder: Path, name: str, ca: Signed, password: bytes | None = None) -> dict[str, str]:
        """Its files, as options."""
        encoding, algorithm = serialization.Encoding.PEM, serialization.NoEncryption()
        key = self.key.private_bytes(
            encoding,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password) if password else algorithm,
        )
        contents = {
            "kv_tls_cert": self.certificate.public_bytes(encoding) + ca.certificate.public_bytes(encoding),
            "kv_tls_key": key,
            "kv_tls_ca": ca.certificate.public_bytes(encoding),
        }
        for kind, content in contents.items():
            (folder / f"{name}-{kind}").write_bytes(content)
        return {kind: str(folder / f"{name}-{kind}") for kind in contents}


@pytest.fixture(scope="module")
def ca() -> Signed:
    return Signed.new()


def node(folder: Path, name: str, ca: Signed, told_ca: Signed | None = None) -> TransferOptions:
    """A node with a certificate of `ca`, which trusts those of `told_ca`."""
    return replace(real("tls"), **Signed.new(ca).write(folder, name, told_ca or ca))


def cannot_be_built(pair: LinkPair, reason: str) -> None:
    """An attempt fails with a `reason`, and none succeeds before. Which end's reason both report is chance."""

    def reasons() -> str:
        return str({**pair.p.unreachable, **pair.d.unreachable})

    try:
        pair.until(lambda: pair.linked() or reason in reasons())
        assert reason in reasons()
    finally:
        pair.close()


def test_certificates_of_one_ca_make_a_link(tmp_path: Path, ca: Signed) -> None:
    p, d = (transports(node(tmp_path, name, ca)) for name in "pd")
    pair = LinkPair(REAL, p_transports=p, d_transports=d)
    pair.until(pair.linked)
    pair.close()


@pytest.mark.parametrize("alone", ["p", "d"])
@pytest.mark.parametrize("has", ["another CA", "one of its own making"])
def test_a_certificate_of_another_ca_makes_none(tmp_path: Path, ca: Signed, alone: str, has: str) -> None:
    def of(name: str) -> TransferOptions:
        if name != alone:
            return node(tmp_path, name, ca)
        return node(tmp_path, name, Signed.new(), ca) if has == "another CA" else real("tls")

    pair = LinkPair(REAL, p_transports=transports(of("p")), d_transports=transports(of("d")))
    cannot_be_built(pair, "CERTIFICATE_VERIFY_FAILED")


def told_instead(certificate: bytes) -> Callable[[Struct], Struct]:
    """On its way, the receiver's certificate is replaced."""

    def tamper(message: Struct) -> Struct:
        if isinstance(message, StoreSet) and message.name == "tls/0":
            return msgspec.structs.replace(message, value=certificate)
        return message

    return tamper


def test_another_certificate_than_was_told_makes_no_link() -> None:
    pair = LinkPair(real("tls"), tamper=told_instead(MadeIdentity().certificate))
    cannot_be_built(pair, "CERTIFICATE_VERIFY_FAILED")


def test_another_certificate_of_the_same_ca_than_was_told_makes_no_link(tmp_path: Path, ca: Signed) -> None:
    other = Signed.new(ca).certificate.public_bytes(serialization.Encoding.DER)
    p, d = (transports(node(tmp_path, name, ca)) for name in "pd")
    pair = LinkPair(REAL, p_transports=p, d_transports=d, tamper=told_instead(other))
    cannot_be_built(pair, "another certificate than it has told")


@contextlib.contextmanager
def shaking(theirs: bytes, identity: MadeIdentity) -> Iterator[tuple[socket.socket, Future[None]]]:
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
    with shaking(MadeIdentity().certificate, MadeIdentity()) as (far, outcome):
        peer(far)
        with pytest.raises(OSError, match=reason):
            outcome.result(PATIENCE_S)


def test_two_ends_that_were_told_each_other_shake_hands_over_tls_1_3() -> None:
    ours, theirs = MadeIdentity(), MadeIdentity()
    with (
        shaking(theirs.certificate, ours) as (far, outcome),
        secured(far, theirs, ours.certificate, accepted=False) as tls,
    ):
        assert tls.version() == "TLSv1.3"
        outcome.result(PATIENCE_S)


# ------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_tls_ca": "ca.pem"}, "--kv-tls-cert and --kv-tls-key is missing"),
        (
            {"kv_tls_cert": "/no/cert.pem", "kv_tls_key": "/no/key.pem", "kv_tls_ca": "/no/ca.pem"},
            "--kv-tls-cert /no/cert.pem: No such file",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_transports(replace(real("tls"), **changes), CPU)  # type: ignore[arg-type]


def test_certificate_files_that_do_not_fit_are_refused(tmp_path: Path, ca: Signed) -> None:
    good, other = node(tmp_path, "good", ca), node(tmp_path, "other", ca)
    locked = Signed.new(ca).write(tmp_path, "locked", ca, password=b"secret")
    (tmp_path / "empty").write_text("")
    for bad in (
        replace(good, kv_tls_key=other.kv_tls_key),
        replace(good, **locked),
        replace(good, kv_tls_cert=str(tmp_path / "empty")),
        replace(good, kv_tls_ca=str(tmp_path / "empty")),
    ):
        with pytest.raises(ConfigError, match=f"--kv-tls-cert {bad.kv_tls_cert} --kv-tls-key "):
            make_transports(bad, CPU)


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
