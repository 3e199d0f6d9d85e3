"""What transports have in common: the challenge, receives into a ring of slots, and the threads of a link."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shared.device_threads import DeviceThreads
from shared.errors import LinkError
from shared.host_memory import new_host_buffer
from shared.kvtransfer.link import Copier, LinkSpec, Op, Stepped
from shared.kvtransfer.staging import HEADER_NBYTES, Slot, SlotRing
from shared.protocol.transfer_messages import Place

NONCE_NBYTES = 32


def challenge(spec: LinkSpec, exchange: Callable[[int, bytes], bytes]) -> None:
    """Have both ends of a new link prove that they hold the secret of its LinkOpen.

    Gloo and NCCL authenticate nothing: a stranger that connects to a gloo port can take a place in a pair group
    and be sent the victim's data. `exchange(round, ours)` swaps NONCE_NBYTES with the peer.
    LinkError: the peer has failed.
    """
    ours = secrets.token_bytes(NONCE_NBYTES)
    theirs = exchange(0, ours)
    proof = exchange(1, _mac(spec, spec.rank, theirs))
    if not hmac.compare_digest(proof, _mac(spec, 1 - spec.rank, ours)):
        raise LinkError(f"the peer of link {spec.name} failed the challenge")


def _mac(spec: LinkSpec, rank: int, nonce: bytes) -> bytes:
    # The rank is in it, so that a proof cannot be reflected to the end that asked for it.
    return hmac.new(spec.secret, b"%d/%s/" % (rank, spec.name.encode()) + nonce, hashlib.sha256).digest()


class RingArrival:
    """A receive into a slot of `ring`, which has the slot back when the message is released.

    For links that do not share memory with their peer.
    """

    def __init__(self, op: Op, slot: Slot, ring: SlotRing) -> None:
        self.slot = slot
        self._op = op
        self._ring = ring

    @property
    def header(self) -> bytes:
        return self.slot.header

    def wait(self, *, block: bool) -> bool:
        return self._op.wait(block=block)

    def release(self) -> None:
        self._ring.give_back(self.slot)


def receive_into(ring: SlotRing, start: Callable[[Slot], Op]) -> RingArrival:
    """Take a slot and `start` a receive into it and its `header`; the slot goes back if that raises."""
    slot = ring.take()
    assert slot is not None, "more arrivals than slots"
    try:
        op = start(slot)
    except BaseException:
        ring.give_back(slot)
        raise
    return RingArrival(op, slot, ring)


class HeadedSlot(Slot):
    """A slot in host memory with room for a header before its payload, so that both are one message."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory[HEADER_NBYTES:])
        self._memory = memory
        self._header = memory[:HEADER_NBYTES].numpy()
        self._message = memory[:0]

    @classmethod
    def new(cls, nbytes: int, device: torch.device) -> HeadedSlot:
        """Room for a payload of `nbytes`; pinned when the KV pages, on `device`, are on a GPU."""
        if device.type == "cuda":
            return cls(torch.zeros(HEADER_NBYTES + nbytes, dtype=torch.uint8, pin_memory=True))
        return cls(new_host_buffer(HEADER_NBYTES + nbytes))

    def message(self, nbytes: int) -> torch.Tensor:
        """The header and a payload of `nbytes`."""
        if self._message.numel() != HEADER_NBYTES + nbytes:
            self._message = self._memory[: HEADER_NBYTES + nbytes]
        return self._message

    @property
    def header(self) -> bytes:
        """The header of the message that lies here."""
        return self._header.tobytes()

    @header.setter
    def header(self, header: bytes) -> None:
        self._header.data[:] = header


def receive_headed(ring: SlotRing, nbytes: int, start: Callable[[torch.Tensor], Op]) -> RingArrival:
    """Take a HeadedSlot, and `start` a receive of a header and a payload of `nbytes` into its message."""

    def receive(slot: Slot) -> Op:
        assert isinstance(slot, HeadedSlot)
        return start(slot.message(nbytes))

    return receive_into(ring, receive)


@dataclass(frozen=True)
class ThreadRunner:
    """Each link has a daemon thread: an op stuck in a dead peer never keeps the process alive."""

    threads: DeviceThreads

    def drive(self, name: str, link: Stepped) -> Callable[[float], bool]:
        def run() -> None:
            while not link.finished:
                link.step(block=True)

        thread = self.threads.start(f"link {name}", run, own_stream=True)

        def join(timeout_s: float) -> bool:
            thread.join(timeout_s)
            return not thread.is_alive()

        return join

    def new_copier(self, name: str) -> Copier:
        """A copier with a thread of its own, which the first copy starts."""
        return self.threads.executor(f"copier {name}", own_stream=True)


@contextmanager
def peer_answers(sock: socket.socket) -> Iterator[None]:
    """Pass on what `sock` raises in the block as a LinkError."""
    try:
        yield
    except TimeoutError:
        raise LinkError(f"timed out after {sock.gettimeout():g} s") from None
    except OSError as error:
        raise LinkError(f"the peer is gone: {error}") from None


def read_whole(sock: socket.socket, message: memoryview) -> None:
    """Fill `message`. LinkError: the stream ends before. Used within `peer_answers`."""
    while message:
        nbytes = sock.recv_into(message)
        if not nbytes:
            raise LinkError("the peer is gone: end of file")
        message = message[nbytes:]


def wait_for_hang_up(sock: socket.socket, timeout_ms: int | None = None) -> bool:
    """Block until the peer has closed its end of `sock`, is dead, or `sock` is shut down here. False: not in time."""
    hang_up = select.poll()
    hang_up.register(sock, select.POLLRDHUP)
    return bool(hang_up.poll(timeout_ms))


def not_one_host(ours: Place, theirs: Place) -> str | None:
    """Why two nodes cannot share memory; None: they can."""
    if ours.host and ours.host == theirs.host:
        return None
    return f"the nodes are not on one host: the receiver is on {ours.host!r}, the sender on {theirs.host!r}"
