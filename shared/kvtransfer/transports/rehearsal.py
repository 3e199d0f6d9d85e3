"""The rehearsal of a link that has just been built: messages pass before pages depend on it.

    sender                                receiver
      ── sizes of its slots ────────────▶   the largest message that both can take
      ◀────────────────────── sizes ─────
      ── ready: its slots are full ─────▶
      ◀───────────── go 0, 1, 2 ─────────   three small messages, one by one: latency from asking to having
      ◀───────────────── go 3 ───────────   all slots at once: bandwidth
      ◀───────────── rate ───────────────   every digest was right

What is said goes over the control connection, as entries of the link's store. A link that fails its rehearsal was not
built: the pair tries its next transport.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec
import torch
import xxhash
from torch.distributed import DistStoreError

from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import RECEIVER, Arrival, Link, LinkRate, LinkSpec, Op
from shared.kvtransfer.staging import Envelope, Slot
from shared.protocol.messages import ReqKey

_NUM_SMALL = 3
_SMALL_NBYTES = 4096
_FIRST_SEQ = 1 << 63
"""No message of a link comes so far."""


class _Sizes(msgspec.Struct, frozen=True):
    num_messages: int
    nbytes: int


_Value = TypeVar("_Value")


def rehearse(link: Link, spec: LinkSpec) -> LinkRate:
    """Pass some messages over `link`. Both ends call it, right after they have built it. LinkError: the link fails.

    Either way every op has left and every slot is back.
    """
    try:
        return _receive(link, spec) if spec.rank == RECEIVER else _send(link, spec)
    except (LinkError, DistStoreError, msgspec.MsgspecError) as error:
        raise LinkError(f"rehearsal: {error}") from None


def _receive(link: Link, spec: LinkSpec) -> LinkRate:
    theirs = _take(spec, "sizes", _Sizes)
    nbytes = min(theirs.nbytes, spec.slot_nbytes) // _SMALL_NBYTES * _SMALL_NBYTES
    sizes = _Sizes(min(theirs.num_messages, link.max_arrivals), nbytes)
    _post(spec, "agreed", sizes)
    _take(spec, "ready", bool)
    latencies_s = [_receive_some(link, spec, [number], _SMALL_NBYTES) for number in range(_NUM_SMALL)]
    large = [_NUM_SMALL + number for number in range(sizes.num_messages)]
    seconds = _receive_some(link, spec, large, nbytes)
    rate = LinkRate(gb_s=len(large) * nbytes / seconds / 1e9, latency_ms=1e3 * min(latencies_s))
    _post(spec, "rate", rate)
    return rate


def _receive_some(link: Link, spec: LinkSpec, numbers: Sequence[int], nbytes: int) -> float:
    """Ask for messages, wait for them, check them. Returns the seconds until all were there."""
    arrivals: list[Arrival] = []
    try:
        with _leaving(link, arrivals):
            arrivals += (link.recv(nbytes, _FIRST_SEQ + number) for number in numbers)
            start = time.perf_counter()
            _post(spec, f"go {numbers[0]}", True)
            for arrival in arrivals:
                arrival.wait(block=True)
            seconds = time.perf_counter() - start
        # Every op has left. The link is aborted once its end was reported, so that the peer is given the reason.
        for number, arrival in zip(numbers, arrivals, strict=True):
            if _envelope(number).open(arrival.header) != _digest(arrival.slot.payload(nbytes)):
                raise LinkError(f"message {number} arrived corrupt")
    finally:
        for arrival in arrivals:
            with suppress(LinkError):  # a link that has died meanwhile says so at its next op
                arrival.release()
    return seconds


def _send(link: Link, spec: LinkSpec) -> LinkRate:
    ring = spec.ring
    assert ring is not None, "a sender has slots"
    _post(spec, "sizes", _Sizes(ring.num_slots, ring.slot_nbytes))
    sizes = _take(spec, "agreed", _Sizes)
    if sizes.num_messages > ring.num_slots or sizes.nbytes > ring.slot_nbytes:
        raise LinkError(f"the peer asks for {sizes}")
    slots: list[Slot] = []
    try:
        while len(slots) < sizes.num_messages:
            slot = ring.take()
            assert slot is not None, "no slot of a new link is out"
            slots.append(slot)
            _fill(slot.payload(sizes.nbytes))
        digests = [_digest(slots[0].payload(nbytes)) for nbytes in (_SMALL_NBYTES, sizes.nbytes)]
        _post(spec, "ready", True)
        for number in range(_NUM_SMALL):
            _send_some(link, spec, number, slots[:1], _SMALL_NBYTES, digests[0])
        _send_some(link, spec, _NUM_SMALL, slots, sizes.nbytes, digests[1])
    finally:
        for slot in slots:
            ring.give_back(slot)
    return _take(spec, "rate", LinkRate)


def _send_some(
    link: Link, spec: LinkSpec, first: int, slots: Sequence[Slot], nbytes: int, digest: int
) -> None:
    """Send one message from each slot when the receiver asks for them."""
    _take(spec, f"go {first}", bool)
    ops: list[Op] = []
    with _leaving(link, ops):
        for number, slot in enumerate(slots, first):
            ops.append(link.send(slot, nbytes, _FIRST_SEQ + number, _envelope(number).seal(digest)))
        for op in ops:
            op.wait(block=True)


@contextmanager
def _leaving(link: Link, ops: Sequence[Op]) -> Iterator[None]:
    """Abort the link if the body fails, and wait until every op has left."""
    try:
        yield
    except BaseException:
        link.abort()
        for op in ops:
            with suppress(LinkError):  # expected of a dead link; what matters is that the op has left
                op.wait(block=True)
        raise


def _envelope(number: int) -> Envelope:
    return Envelope(ReqKey("", "rehearsal"), Chunk(0, 1, 0, 1), number)


def _fill(payload: torch.Tensor) -> None:
    """Words that all differ."""
    words = payload.view(torch.int64)
    torch.arange(len(words), out=words)
    words.mul_(0x9E3779B97F4A7C15 - (1 << 64))
    if payload.is_cuda:
        torch.cuda.current_stream(payload.device).synchronize()


def _digest(payload: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(payload.cpu().numpy().data)


def _post(spec: LinkSpec, name: str, value: object) -> None:
    spec.store.post(f"rehearsal/{name}", msgspec.msgpack.encode(value))


def _take(spec: LinkSpec, name: str, kind: type[_Value]) -> _Value:
    return msgspec.msgpack.decode(spec.store.take(f"rehearsal/{name}"), type=kind)
