"""The rehearsal of a link that has just been built: messages pass before pages depend on it.

    sender                                receiver
      ── sizes of its slots ────────────▶   the largest messages that both can take
      ◀────────────────────── sizes ─────
      ── ready: its slots are full ─────▶
      ◀──────────────── go map ──────────   a small message from each slot, which maps what is mapped
      ◀─────── go 0, go 1, go 2 ─────────   small messages, one by one: latency from asking to having
      ◀─────────────── go all ───────────   a large one from each slot: bandwidth
      ◀───────────── rate ───────────────   every digest was right

The receiver has a message when it has copied it to memory of its own, where its pages are: over memory that both ends
map, a message is there before any byte of it has moved. What is said goes over the control connection, as entries of
the link's store. A link that fails its rehearsal was not built: the pair tries its next transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import torch
import xxhash
from torch.distributed import DistStoreError

from shared.device_streams import DeviceStreams
from shared.errors import LinkError
from shared.kvtransfer.layout import Chunk
from shared.kvtransfer.link import RECEIVER, Arrival, Link, LinkRate, LinkSpec, Op
from shared.kvtransfer.staging import Envelope, Slot
from shared.protocol.messages import ReqKey

_SMALL_NBYTES = 4096
_MAX_NBYTES = 128 << 20
"""Of all large messages together: what four slots of a GPU take."""
_FIRST_SEQ = 1 << 63
"""No message of a link comes so far."""


class _Sizes(msgspec.Struct, frozen=True):
    num_messages: Annotated[int, msgspec.Meta(ge=1)]
    nbytes: Annotated[int, msgspec.Meta(ge=_SMALL_NBYTES)]

    @property
    def steps(self) -> list[tuple[str, range, int]]:
        """What the receiver asks for: its name, the numbers of its messages, and their size."""
        n = self.num_messages
        latencies = [(str(i), range(n + i, n + i + 1), _SMALL_NBYTES) for i in range(3)]
        return [("map", range(n), _SMALL_NBYTES), *latencies, ("all", range(n + 3, 2 * n + 3), self.nbytes)]


# Made here, since a process crashes in which two threads decode a type for the first time at the same moment: msgspec
# shows the second one what the first has not filled in yet.
_SIZES = msgspec.msgpack.Decoder(_Sizes)
_FLAG = msgspec.msgpack.Decoder(bool)
_RATE = msgspec.msgpack.Decoder(LinkRate)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Trial:
    """A link that is rehearsed. `fail` takes why it dies, before it is aborted."""

    link: Link
    spec: LinkSpec
    fail: Callable[[str], None]

    def post(self, name: str, value: object) -> None:
        """Tell the peer."""
        self.spec.store.post(f"rehearsal/{name}", msgspec.msgpack.encode(value))

    def take(self, name: str, decoder: msgspec.msgpack.Decoder[_Value]) -> _Value:
        """Wait for what the peer tells."""
        return decoder.decode(self.spec.store.take(f"rehearsal/{name}"))

    @contextmanager
    def leaving(self, ops: Sequence[Op]) -> Iterator[None]:
        """If the body fails, report why, abort the link, and wait until every op has left."""
        try:
            yield
        except BaseException as error:
            self.fail(f"rehearsal: {error}")
            self.link.abort()
            for op in ops:
                with suppress(LinkError):  # expected of a dead link; what matters is that the op has left
                    op.wait(block=True)
            raise


class Rehearsal:
    """Rehearses links of a node whose pages are on `device`. It measures what a link and one copy there take."""

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without `streams`, the device is a CPU."""
        self._device = device
        self._streams = streams
        self._clock = clock

    def __call__(self, link: Link, spec: LinkSpec, fail: Callable[[str], None]) -> LinkRate:
        """Pass some messages over `link`. Both ends call it, right after they have built it.

        LinkError: the link fails, and `fail` was told why if it had to be aborted, which its peer would otherwise
        report first. Either way every op has left and every slot is back.
        """
        try:
            trial = _Trial(link, spec, fail)
            return self._receive(trial) if spec.rank == RECEIVER else self._send(trial)
        except (LinkError, DistStoreError, msgspec.MsgspecError, torch.OutOfMemoryError) as error:
            raise LinkError(f"rehearsal: {error}") from None

    def _receive(self, trial: _Trial) -> LinkRate:
        theirs = trial.take("sizes", _SIZES)
        num_messages = min(theirs.num_messages, trial.link.max_arrivals)
        nbytes = min(theirs.nbytes, trial.spec.ring.slot_nbytes, _MAX_NBYTES // num_messages)
        sizes = _Sizes(num_messages, nbytes // _SMALL_NBYTES * _SMALL_NBYTES)
        trial.post("agreed", sizes)
        target = torch.empty(sizes.nbytes, dtype=torch.uint8, device=self._device)
        target.fill_(0)  # memory is made by its first touch, which is no part of a copy
        trial.take("ready", _FLAG)
        _, *latencies_s, seconds = [self._receive_some(trial, target, *step) for step in sizes.steps]
        gb_s = num_messages * sizes.nbytes / seconds / 1e9
        rate = LinkRate(gb_s=gb_s, latency_ms=1e3 * min(latencies_s))
        trial.post("rate", rate)
        return rate

    def _receive_some(
        self, trial: _Trial, target: torch.Tensor, name: str, numbers: range, nbytes: int
    ) -> float:
        """Ask for messages, copy each to `target`, check them. Returns the seconds until the last was copied."""
        arrivals: list[Arrival] = []
        try:
            with trial.leaving(arrivals):
                arrivals += (trial.link.recv(nbytes, _FIRST_SEQ + number) for number in numbers)
                self._synchronize()
                start = self._clock()
                trial.post(f"go {name}", True)
                for arrival in arrivals:
                    arrival.wait(block=True)
                    target[:nbytes].copy_(arrival.slot.payload(nbytes), non_blocking=True)
                self._synchronize()
                seconds = self._clock() - start
            # Every op has left. The link is aborted once its end was reported, so that the peer is given the reason.
            for number, arrival in zip(numbers, arrivals, strict=True):
                if _envelope(number).open(arrival.header) != _digest(arrival.slot.payload(nbytes)):
                    raise LinkError(f"message {number} arrived corrupt")
        finally:
            self._synchronize()  # also after a failure no copy reads what is released
            for arrival in arrivals:
                with suppress(LinkError):  # a link that has died meanwhile says so at its next op
                    arrival.release()
        return seconds

    def _send(self, trial: _Trial) -> LinkRate:
        ring = trial.spec.ring
        trial.post("sizes", _Sizes(ring.num_slots, ring.slot_nbytes))
        sizes = trial.take("agreed", _SIZES)
        too_large = sizes.num_messages > ring.num_slots or sizes.nbytes > ring.slot_nbytes
        if too_large or sizes.nbytes % _SMALL_NBYTES:
            raise LinkError(f"the peer asks for {sizes}")
        slots: list[Slot] = []
        try:
            while len(slots) < sizes.num_messages:
                slot = ring.take()
                assert slot is not None, "no slot of a new link is out"
                slots.append(slot)
                _fill(slot.payload(sizes.nbytes))
            self._synchronize()
            digests = {nbytes: _digest(slots[0].payload(nbytes)) for nbytes in (_SMALL_NBYTES, sizes.nbytes)}
            trial.post("ready", True)
            for name, numbers, nbytes in sizes.steps:
                _send_some(trial, name, numbers, slots, nbytes, digests[nbytes])
        finally:
            for slot in slots:
                ring.give_back(slot)
        return trial.take("rate", _RATE)

    def _synchronize(self) -> None:
        """Wait for what this thread has queued on the device."""
        if self._streams is not None:
            self._streams.current().synchronize()


def _send_some(
    trial: _Trial, name: str, numbers: range, slots: Sequence[Slot], nbytes: int, digest: int
) -> None:
    """Send one message from each slot, or from the first ones, when the receiver asks for them."""
    trial.take(f"go {name}", _FLAG)
    ops: list[Op] = []
    with trial.leaving(ops):
        for number, slot in zip(numbers, slots, strict=False):
            ops.append(trial.link.send(slot, nbytes, _FIRST_SEQ + number, _envelope(number).seal(digest)))
        for op in ops:
            op.wait(block=True)


def _envelope(number: int) -> Envelope:
    return Envelope(ReqKey("", "rehearsal"), Chunk(0, 1, 0, 1), number)


def _fill(payload: torch.Tensor) -> None:
    """Words that all differ."""
    words = payload.view(torch.int64)
    torch.arange(len(words), out=words)
    words.mul_(0x9E3779B97F4A7C15 - (1 << 64))


def _digest(payload: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(payload.cpu().numpy().data)
