"""Links over TCP for networks that are not trusted: one port, authenticated before anything else, encrypted if asked.

    sender                                        receiver
      ◀── address of its port, by the store ────    expects the hello of this link
      ── connection, hello ─────────────────────▶   its `kv port` thread admits it (`kv_port`)
      ◀── TLS 1.3, if `--kv-tls` ───────────────▶   certificates were told by the store (`tls`)
      ◀── challenge ────────────────────────────▶   each end has proven itself
      ── header, payload, header, payload, ... ─▶   as granted: lengths are in no message

A link with TLS is a transport of its own, `tls`, so that two nodes that meet never agree on less than both ask for.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import torch
from torch.distributed import DistStoreError

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import RECEIVER, Link, LinkSpec
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import (
    NONCE_NBYTES,
    HeadedSlot,
    RingArrival,
    challenge,
    peer_answers,
    read_whole,
    receive_headed,
    wait_for_hang_up,
)
from shared.kvtransfer.transports.kv_port import MAGIC, KvPort
from shared.kvtransfer.transports.tls import Identity, secured
from shared.protocol.transfer_messages import Place

_PIECE_NBYTES = 1 << 20
"""Of a message, sent at once: the timeout is for a piece, so that a slow network is not a dead one."""
_NUM_PROBES = 2


class TcpLinkFactory:
    """Builds links that are accepted at `options.kv_port`.

    ConfigError: the port cannot be had, or the certificate not made.
    """

    def __init__(self, options: TransferOptions, device: torch.device, threads: DeviceThreads) -> None:
        self._options = options
        self._device = device
        self._threads = threads
        self._identity = Identity() if options.kv_tls else None
        self._port = KvPort(options.bind_host, options.kv_port, threads)

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return None

    def new_slot(self, nbytes: int) -> HeadedSlot:
        return HeadedSlot.new(nbytes, self._device)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "a socket is waited for by blocking"
        with ExitStack() as exits:
            try:
                sock = self._secured(spec, exits)
            except (OSError, ValueError, DistStoreError) as error:  # ValueError: the peer told no address
                raise LinkError(f"building link {spec.name}: {error}") from None
            link = TcpLink(spec, sock, on_dead, self._threads)
            link.held = exits.pop_all()
        return link

    def _secured(self, spec: LinkSpec, exits: ExitStack) -> socket.socket:
        if self._identity is None:
            return self._connected(spec, exits)
        spec.store.set(f"tls/{spec.rank}", self._identity.certificate)
        theirs = spec.store.get(f"tls/{1 - spec.rank}")
        sock = self._connected(spec, exits)
        return exits.enter_context(secured(sock, self._identity, theirs, accepted=spec.rank == RECEIVER))

    def _connected(self, spec: LinkSpec, exits: ExitStack) -> socket.socket:
        """A connection to the peer, which `exits` closes."""
        hello = MAGIC + hmac.new(spec.secret, b"hello/" + spec.name.encode(), hashlib.sha256).digest()
        timeout_s = self._options.op_timeout_s
        if spec.rank == RECEIVER:
            acceptor = exits.enter_context(self._port.opened())
            with acceptor.expecting(hello) as arriving:
                arriving.add_done_callback(lambda _: spec.store.feed("tcp/arrived", b""))
                spec.store.set("tcp/address", "{} {}".format(*acceptor.address))
                spec.store.wait(["tcp/arrived"])  # can be given up
                sock = exits.enter_context(arriving.result(0))
        else:
            host, port = spec.store.get("tcp/address").decode().split(" ")
            sock = exits.enter_context(socket.create_connection((host, int(port)), timeout_s))
            sock.sendall(hello)
        sock.settimeout(timeout_s)
        notice_vanished(sock, self._options.peer_timeout_s)
        return sock


def notice_vanished(sock: socket.socket, timeout_s: float) -> None:
    """Have the kernel end `sock` when the host of its peer has not answered for `timeout_s`, also while it is idle.

    The kernel counts whole seconds, and needs two: one until it asks, and one for the answer. It looks whether the
    time is over only when a probe is due, so the last one is due at its end.
    """
    whole_s = max(int(timeout_s), _NUM_PROBES)
    interval_s = max(whole_s // (_NUM_PROBES + 1), 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(whole_s - _NUM_PROBES * interval_s, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TcpLink:
    """One end: a socket, a thread that sends or receives, and a canary thread that notices when the peer is gone."""

    def __init__(
        self,
        spec: LinkSpec,
        sock: socket.socket,
        on_dead: Callable[[str], None],
        threads: DeviceThreads,
    ) -> None:
        self.max_arrivals = spec.ring.num_slots
        self.held = ExitStack()
        """What ends with the link: its socket, and at the receiver its use of the port."""
        self._socket = sock
        self._ring = spec.ring
        self._on_dead = on_dead
        challenge(spec, self._exchange)
        self._io = threads.executor(f"io {spec.name}")
        self._canary_thread = threads.start(f"canary {spec.name}", self._watch)

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> SocketOp:
        assert isinstance(slot, HeadedSlot)
        slot.header = header
        return SocketOp(self._io.submit(self._write, slot.message(nbytes).numpy().data))

    def recv(self, nbytes: int, seq: int) -> RingArrival:
        def start(message: torch.Tensor) -> SocketOp:
            return SocketOp(self._io.submit(self._read, message.numpy().data))

        return receive_headed(self._ring, nbytes, start)

    def abort(self) -> None:
        try:
            # Not as an SSLSocket, which would take its TLS away from the thread that uses it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            return

    def close(self) -> None:
        self.abort()
        self._io.shutdown()
        self._canary_thread.join()
        self.held.close()

    def _write(self, message: memoryview) -> None:
        with peer_answers(self._socket):
            while message:
                message = message[self._socket.send(message[:_PIECE_NBYTES]) :]

    def _read(self, message: memoryview) -> None:
        with peer_answers(self._socket):
            read_whole(self._socket, message)

    def _exchange(self, turn: int, ours: bytes) -> bytes:
        theirs = bytearray(NONCE_NBYTES)
        self._write(memoryview(ours))
        self._read(memoryview(theirs))
        return bytes(theirs)

    def _watch(self) -> None:
        wait_for_hang_up(self._socket)
        self._on_dead("the peer is gone")


class SocketOp:
    """A message that the data thread sends or receives."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self, *, block: bool) -> bool:
        assert block, "a socket is waited for by blocking"
        self._done.result()
        return True
