"""Links between two processes of one host, where the receiver reads the slots that the sender has gathered into.

A message is a record on a Unix socket, `seq | slot | nbytes | header`. The first record of a slot also has what makes
the slot visible to the receiver: bytes, and a descriptor beside them. `SlotSharing` says what these are. The receiver
scatters straight from the slot and answers `seq` when it has. Only then does the slot go home. So a page is copied
twice in all, once by each side.

The socket is also the canary (a dead peer's end is closed by the kernel) and the way to abort (`shutdown`). It has
no name in a file system: the receiver listens on an abstract one while the link is built.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import DistStoreError

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.kvtransfer.link import RECEIVER, LinkSpec
from shared.kvtransfer.staging import HEADER_NBYTES, Slot
from shared.kvtransfer.transports.common import NONCE_NBYTES, challenge, peer_answers, wait_for_hang_up

_MESSAGE = struct.Struct(f"<QIQ{HEADER_NBYTES}s")  # seq, slot, nbytes, header
_MAX_SHOWN_NBYTES = 1024
_RELEASED = struct.Struct("<Q")  # seq


class SlotSharing(Protocol):
    """How one process reads the slots of another. Each end of a link has one of its own. All raise LinkError."""

    def show(self, slot: Slot) -> tuple[bytes, int]:
        """SENDER: what makes `slot` visible to the peer: some bytes, and a descriptor that is passed beside them."""
        ...

    def see(self, shown: bytes, descriptor: int) -> Slot:
        """RECEIVER: the slot that the peer has shown. Takes the descriptor over, also when it raises."""
        ...

    def close(self) -> None:
        """Let go of what was shown or seen. The socket is closed, and no slot is read any more."""
        ...


def build_unix_link(
    spec: LinkSpec,
    options: TransferOptions,
    sharing: SlotSharing,
    on_dead: Callable[[str], None],
    threads: DeviceThreads,
) -> UnixLink:
    """Connect with the peer that builds the same link. LinkError: it did not come, or failed the challenge."""
    try:
        sock = _accept(spec, options.op_timeout_s) if spec.rank == RECEIVER else _connect(spec, options)
    except (OSError, ValueError, DistStoreError) as error:  # ValueError: what the peer gave is no address
        raise LinkError(f"building link {spec.name}: {error}") from None
    sock.settimeout(options.op_timeout_s)
    try:
        return UnixLink(spec, sock, sharing, on_dead, threads)
    except BaseException:
        sock.close()
        raise


class UnixLink:
    """One end: a socket, and a canary thread that notices when the peer is gone."""

    def __init__(
        self,
        spec: LinkSpec,
        sock: socket.socket,
        sharing: SlotSharing,
        on_dead: Callable[[str], None],
        threads: DeviceThreads,
    ) -> None:
        # Arrivals hold no memory of this side, so more are granted than the sender has slots: what to gather next is
        # known there when a slot comes home, and one Grant is for many chunks.
        self.max_arrivals = 4 * spec.ring.num_slots
        self._socket = sock
        self._sharing = sharing
        self._on_dead = on_dead
        self._shown: dict[Slot, int] = {}
        """SENDER: slots that the peer has been shown, and their numbers."""
        self._seen: dict[int, Slot] = {}
        """RECEIVER: the slots of the peer, by number."""
        challenge(spec, self._exchange)
        self._canary_thread = threads.start(f"canary {spec.name}", self._watch)

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> UnixOp:
        number = self._shown.get(slot)
        if number is not None:
            self._write(_MESSAGE.pack(seq, number, nbytes, header))
        else:
            number = self._shown[slot] = len(self._shown)
            shown, descriptor = self._sharing.show(slot)
            self._write(_MESSAGE.pack(seq, number, nbytes, header) + shown, descriptor)
        return UnixOp(lambda: self.wait_released(seq))

    def recv(self, nbytes: int, seq: int) -> UnixArrival:
        return UnixArrival(self, nbytes, seq)

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
        self._seen.clear()
        self._sharing.close()

    # -------------------------------------------------------------------------------- for the ops
    def read_message(self, nbytes: int, seq: int) -> tuple[bytes, Slot]:
        """Wait for message `seq`. Returns its header, and the slot where its payload lies."""
        record, descriptor = self._read_with_descriptor()
        got_seq, number, got_nbytes, header = _MESSAGE.unpack_from(record)
        if descriptor is not None:
            self._seen[number] = self._sharing.see(record[_MESSAGE.size :], descriptor)
        if (got_seq, got_nbytes) != (seq, nbytes):
            raise LinkError(
                f"message {got_seq} of {got_nbytes} bytes came where {seq} of {nbytes} was granted"
            )
        slot = self._seen.get(number)
        if slot is None or slot.buffer.numel() < nbytes:
            slot_is = "was never shown" if slot is None else f"has {slot.buffer.numel()} bytes"
            raise LinkError(
                f"corrupt peer: message {seq} of {nbytes} bytes in slot {number}, which {slot_is}"
            )
        # What a dead peer has sent can still be read, but device memory goes with its process.
        if wait_for_hang_up(self._socket, 0):
            raise LinkError("the peer is gone, and its slots with it")
        return header, slot

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
        with peer_answers(self._socket):
            record = self._socket.recv(nbytes + 1)
        if len(record) != nbytes:
            raise _malformed(record)
        return record

    def _read_with_descriptor(self) -> tuple[bytes, int | None]:
        """The record of a message, and the descriptor that comes with the first record of a slot."""
        most = _MESSAGE.size + _MAX_SHOWN_NBYTES
        with peer_answers(self._socket):
            record, descriptors, _, _ = socket.recv_fds(self._socket, most + 1, 1, socket.MSG_CMSG_CLOEXEC)
        descriptor = descriptors[0] if descriptors else None
        if _MESSAGE.size <= len(record) <= (_MESSAGE.size if descriptor is None else most):
            return record, descriptor
        if descriptor is not None:
            os.close(descriptor)
        raise _malformed(record)

    def _watch(self) -> None:
        wait_for_hang_up(self._socket)
        self._on_dead("the peer is gone")


class UnixOp:
    """Runs once, on the thread that first waits for it, and keeps its outcome for later waits.

    As a send, a message that the receiver may be reading: its slot must not be written.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run: Callable[[], Any] | None = run
        self._failure: str | None = None
        self._value: Any = None

    def wait(self, *, block: bool) -> bool:
        assert block, "a socket is waited for by blocking"
        if (run := self._run) is not None:
            self._run = None
            try:
                self._value = run()
            except LinkError as error:
                self._failure = str(error)
        if self._failure is not None:
            raise LinkError(self._failure)
        return True


class UnixArrival(UnixOp):
    """A message to come, then one that lies in the sender's slot."""

    def __init__(self, link: UnixLink, nbytes: int, seq: int) -> None:
        super().__init__(lambda: link.read_message(nbytes, seq))
        self._link = link
        self._seq = seq

    @property
    def header(self) -> bytes:
        header: bytes = self._value[0]
        return header

    @property
    def slot(self) -> Slot:
        slot: Slot = self._value[1]
        return slot

    def release(self) -> None:
        self._value = None
        self._link.release(self._seq)


def _malformed(record: bytes) -> LinkError:
    return (
        LinkError("the peer sent a malformed record")
        if record
        else LinkError("the peer is gone: end of file")
    )


def _accept(spec: LinkSpec, timeout_s: float) -> socket.socket:
    address = f"\0baton-kv-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        spec.store.set("unix/address", address)
        spec.store.wait(["unix/connected"])  # can be given up; from here on the peer is in the queue
        listener.settimeout(timeout_s)
        return listener.accept()[0]


def _connect(spec: LinkSpec, options: TransferOptions) -> socket.socket:
    address = spec.store.get("unix/address").decode()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(options.op_timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    spec.store.set("unix/connected", b"")
    return sock
