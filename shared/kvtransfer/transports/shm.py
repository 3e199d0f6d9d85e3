"""Links between two processes of one host: the receiver reads where the sender has gathered.

The sender's staging slots are memfds. A message is a record on a Unix socket, `seq | slot | nbytes`, with the slot's
descriptor beside it the first time; the receiver maps the slot read-only, scatters straight from it, and answers
`seq` when it has: only then does the slot go home. So a page is copied twice in all, once by each side.

The socket is also the canary (a dead peer's end is closed by the kernel) and the way to abort (`shutdown`). It has
no name in a file system: the receiver listens on an abstract one while the link is built.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import DistStoreError

from shared.config import TransferOptions
from shared.errors import ConfigError, LinkError
from shared.kvtransfer.link import RECEIVER, Copier, Driver, Link, LinkSpec, Stepped
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.transports.common import NONCE_NBYTES, ThreadDriver, challenge, thread_copier
from shared.kvtransfer.transports.shared_memory import SharedSlot, map_read_only

_MESSAGE = struct.Struct("<QIQ")  # seq, slot, nbytes
_RELEASED = struct.Struct("<Q")  # seq
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REHEARSAL = (1 << 64) - 1
"""The seq of the message that proves, while the link is built, that its memory can be shared."""


class ShmLinkFactory:
    """Builds links to processes of this host; each is stepped by a thread of its own."""

    def __init__(self, options: TransferOptions, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"--kv-transfer shm moves KV through host memory; the KV pages are on {device}")
        try:
            SharedSlot(1)
        except LinkError as error:
            raise ConfigError(f"--kv-transfer shm: {error}") from None
        self._options = options

    def drive(self, name: str, loop: Stepped) -> Driver:
        return ThreadDriver(name, loop)

    def new_copier(self, name: str) -> Copier:
        return thread_copier(name)

    def new_slot(self, nbytes: int) -> Slot:
        return SharedSlot(nbytes)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        assert block, "a socket is waited for by blocking"
        try:
            sock = self._accept(spec) if spec.rank == RECEIVER else self._connect(spec)
        except (OSError, DistStoreError) as error:
            raise LinkError(f"building link {spec.name}: {error}") from None
        sock.settimeout(self._options.op_timeout_s)
        try:
            return ShmLink(spec, sock, self._options.num_slots, on_dead)
        except BaseException:
            sock.close()
            raise

    def _accept(self, spec: LinkSpec) -> socket.socket:
        address = f"\0baton-kv-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            spec.store.set("shm/address", address)
            spec.store.wait(["shm/connected"])  # can be given up; from here on the peer is in the queue
            return accept_from(os.getuid(), listener, self._options.op_timeout_s)

    def _connect(self, spec: LinkSpec) -> socket.socket:
        address = spec.store.get("shm/address").decode()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(self._options.op_timeout_s)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        spec.store.set("shm/connected", b"")
        return sock


class ShmLink:
    """One end: a socket, and a canary thread that notices when the peer is gone."""

    def __init__(
        self, spec: LinkSpec, sock: socket.socket, num_slots: int, on_dead: Callable[[str], None]
    ) -> None:
        # Arrivals hold no memory of this side, so more are granted than the sender has slots: what to gather next is
        # known there when a slot comes home, and one Grant is for many chunks.
        self.max_arrivals = 4 * num_slots
        self._rank = spec.rank
        self._socket = sock
        self._on_dead = on_dead
        self._shown: dict[Slot, int] = {}
        """SENDER: slots that the peer has been shown, and their numbers."""
        self._mapped: dict[int, Slot] = {}
        """RECEIVER: the slots of the peer that are mapped here, by number."""
        challenge(spec, self._exchange)
        self._rehearse()
        self._canary_thread = threading.Thread(target=self._watch, name=f"canary {spec.name}", daemon=True)
        self._canary_thread.start()

    def send(self, slot: Slot, nbytes: int, seq: int) -> ShmSend:
        assert isinstance(slot, SharedSlot)
        number = self._shown.get(slot)
        if number is not None:
            self._write(_MESSAGE.pack(seq, number, nbytes))
        else:
            number = self._shown[slot] = len(self._shown)
            self._write(_MESSAGE.pack(seq, number, nbytes), slot.descriptor)
        return ShmSend(self, seq)

    def recv(self, nbytes: int, seq: int) -> ShmArrival:
        return ShmArrival(self, nbytes, seq)

    def abort(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            return

    def close(self) -> None:
        self.abort()
        self._canary_thread.join()
        self._socket.close()
        self._shown.clear()
        self._mapped.clear()

    # -------------------------------------------------------------------------------- for the ops
    def read_message(self, nbytes: int, seq: int) -> Slot:
        """Wait for message `seq`, and return the slot where it lies."""
        record, descriptors = self._read_with_descriptor(_MESSAGE.size)
        got_seq, number, got_nbytes = _MESSAGE.unpack(record)
        for descriptor in descriptors:
            self._mapped[number] = Slot(map_read_only(descriptor))
        slot = self._mapped.get(number)
        if (got_seq, got_nbytes) != (seq, nbytes) or slot is None or slot.buffer.numel() < nbytes:
            raise LinkError(
                f"message {got_seq} of {got_nbytes} bytes came where {seq} of {nbytes} was granted"
            )
        return slot

    def release(self, seq: int) -> None:
        """Tell the sender that message `seq` has been read."""
        self._write(_RELEASED.pack(seq))

    def wait_released(self, seq: int) -> None:
        """Wait until the receiver has read message `seq`. It reads them in order."""
        (released,) = _RELEASED.unpack(self._read(_RELEASED.size))
        if released != seq:
            raise LinkError(f"message {released} was released where {seq} was under way")

    def _exchange(self, turn: int, ours: bytes) -> bytes:
        self._write(ours)
        return self._read(NONCE_NBYTES)

    def _rehearse(self) -> None:
        # One message passes, so that memory that cannot be shared shows before pages depend on it.
        if self._rank == RECEIVER:
            arrival = self.recv(NONCE_NBYTES, _REHEARSAL)
            arrival.wait(block=True)
            arrival.release()
            self._mapped.clear()
        else:
            slot = SharedSlot(NONCE_NBYTES)
            self.send(slot, NONCE_NBYTES, _REHEARSAL).wait(block=True)
            self._shown.clear()

    def _write(self, record: bytes, *descriptors: int) -> None:
        try:
            if descriptors:
                socket.send_fds(self._socket, [record], descriptors)
            else:
                self._socket.send(record)
        except OSError as error:
            raise LinkError(f"the peer takes no more: {error}") from None

    def _read(self, nbytes: int) -> bytes:
        # The kernel closes descriptors that come with a record that is read like this.
        with self._reading():
            record = self._socket.recv(nbytes + 1)
        return _checked(record, nbytes)

    def _read_with_descriptor(self, nbytes: int) -> tuple[bytes, list[int]]:
        with self._reading():
            record, descriptors, _, _ = socket.recv_fds(self._socket, nbytes + 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            return _checked(record, nbytes), descriptors
        except LinkError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise LinkError(f"timed out after {self._socket.gettimeout():g} s") from None
        except OSError as error:
            raise LinkError(f"the peer is gone: {error}") from None

    def _watch(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._socket, select.POLLRDHUP)
        hang_up.poll()
        self._on_dead("the peer is gone")


class ShmSend:
    """A message that the receiver may be reading: its slot must not be written."""

    def __init__(self, link: ShmLink, seq: int) -> None:
        self._link = link
        self._seq = seq
        self._outcome = _Outcome()

    def wait(self, *, block: bool) -> bool:
        assert block, "a socket is waited for by blocking"
        self._outcome.of(lambda: self._link.wait_released(self._seq))
        return True


class ShmArrival:
    """A message to come, then one that lies in the sender's slot."""

    def __init__(self, link: ShmLink, nbytes: int, seq: int) -> None:
        self._link = link
        self._nbytes = nbytes
        self._seq = seq
        self._outcome = _Outcome()

    def wait(self, *, block: bool) -> bool:
        assert block, "a socket is waited for by blocking"
        self._outcome.of(lambda: self._link.read_message(self._nbytes, self._seq))
        return True

    @property
    def slot(self) -> Slot:
        slot: Slot = self._outcome.value
        return slot

    def release(self) -> None:
        self._outcome.value = None
        self._link.release(self._seq)


class _Outcome:
    """Runs an op once, and keeps its outcome for later calls."""

    def __init__(self) -> None:
        self.value: Any = None
        self._failure: str | None = None
        self._ended = False

    def of(self, run: Callable[[], Any]) -> None:
        """Raises LinkError if the op failed."""
        if not self._ended:
            self._ended = True
            try:
                self.value = run()
            except LinkError as error:
                self._failure = str(error)
        if self._failure is not None:
            raise LinkError(self._failure)


def _checked(record: bytes, nbytes: int) -> bytes:
    if len(record) != nbytes:
        raise LinkError("the peer sent a malformed record" if record else "the peer is gone: end of file")
    return record


def accept_from(uid: int, listener: socket.socket, timeout_s: float) -> socket.socket:
    """The first connection of a process of the user `uid`. OSError: none came in time.

    All users of the host see an abstract name, so connections of others are closed.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        sock, _ = listener.accept()
        if _uid_of_peer(sock) == uid:
            return sock
        sock.close()


def _uid_of_peer(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(credentials)[1]
    return uid
