"""Staging slots are damaged behind the digest, over each transport: no damaged page is taken for a whole one.

Both sides are real, and so is the link between them. Each transfer is one message. A `FaultyLink` damages its slot
after the message has been sealed: before it is sent, or while it is on its way and perhaps being read.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
import xxhash

from shared.kernels.cpu.pages import NativePageMover
from shared.kvcache.page_mover import PageMover, TorchPageMover
from shared.kvtransfer.link import Arrival, Link, LinkFactory, LinkSpec, Op
from shared.kvtransfer.staging import HEADER_NBYTES, Slot
from shared.kvtransfer.states import Received
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Place
from tests.unit.kvtransfer.link_pair import LAYOUT, LinkPair, handoff, key, real, transports

NUM_FAULTS = 100_000
"""Over each transport."""
BATCH = 16
PAGES = 2
"""Of a transfer, all layers in one message."""
ROWS = 2 * LAYOUT.num_layers


@dataclass(frozen=True)
class Path:
    """What carries pages, and what copies them."""

    backend: str
    new_mover: Callable[[], PageMover]


PATHS = {
    "shm": Path("shm", NativePageMover),
    "gloo": Path("gloo", NativePageMover),
    "cuda-ipc": Path("cuda-ipc", TorchPageMover),
}
"""`cuda-ipc`: over a fake of the CUDA runtime, with the code that copies and digests pages of a GPU in torch."""


class Fault(StrEnum):
    """How a slot is damaged."""

    FLIPPED_BYTE = "flipped byte"
    FLIPPED_DIGEST = "flipped bit of the digest"
    SWAPPED_PAGES = "swapped pages"
    SWAPPED_LAYERS = "swapped layers"
    OTHER_PAGES = "pages of another transfer"
    LATE_BYTE = "byte written while the message is read"
    LATE_PAGES = "pages of another transfer written while the message is read"


_KEY, _KEY_AT = struct.Struct("<Q"), 16
LATE = (Fault.LATE_BYTE, Fault.LATE_PAGES)
WEIGHTS = {
    Fault.FLIPPED_BYTE: 8,
    Fault.FLIPPED_DIGEST: 1,
    Fault.SWAPPED_PAGES: 3,
    Fault.SWAPPED_LAYERS: 3,
} | {
    Fault.OTHER_PAGES: 2,
    Fault.LATE_BYTE: 2,
    Fault.LATE_PAGES: 1,
}


class Damages(Protocol):
    """What a FaultyLink does to messages."""

    def send(self, slot: Slot, nbytes: int, header: bytes, send: Callable[[bytes], Op]) -> Op: ...


class Damage:
    """Damages one message after the other, and remembers how."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._earlier: torch.Tensor | None = None
        self.begun = False
        self.faults: dict[int, Fault] = {}
        """By the hash of a transfer's key, as it is in the header."""

    def send(self, slot: Slot, nbytes: int, header: bytes, send: Callable[[bytes], Op]) -> Op:
        """Damage the sealed message in `slot`, or its header, before or after it is sent, once this has `begun`."""
        if not self.begun:
            return send(header)
        (fault,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        whole = slot.payload(nbytes).clone()
        if self._earlier is None or torch.equal(whole, self._earlier):
            fault = Fault.FLIPPED_BYTE
        self.faults[_KEY.unpack_from(header, _KEY_AT)[0]] = fault
        if fault is Fault.FLIPPED_DIGEST:
            flipped = bytearray(header)
            flipped[self._random.randrange(HEADER_NBYTES - 8, HEADER_NBYTES)] ^= 1 << self._random.randrange(
                8
            )
            header = bytes(flipped)
        elif fault not in LATE:
            self._damage(slot, nbytes, fault)
        op = send(header)
        if fault in LATE:
            self._damage(slot, nbytes, fault)
        self._earlier = whole
        return op

    def _damage(self, slot: Slot, nbytes: int, fault: Fault) -> None:
        rng, payload = self._random, slot.payload(nbytes)
        match fault:
            case Fault.FLIPPED_BYTE | Fault.LATE_BYTE:
                payload[rng.randrange(payload.numel())] ^= rng.randrange(1, 256)
            case Fault.SWAPPED_PAGES:
                row = rng.randrange(ROWS)
                pages = payload.view(ROWS, PAGES, -1)[row]
                pages[[0, 1]] = pages[[1, 0]]
            case Fault.SWAPPED_LAYERS:
                rows, (one, other) = payload.view(ROWS, -1), rng.sample(range(ROWS), 2)
                rows[[one, other]] = rows[[other, one]]
            case Fault.OTHER_PAGES | Fault.LATE_PAGES:
                assert self._earlier is not None
                payload.copy_(self._earlier)


class FaultyLink:
    """The sending end of a link."""

    def __init__(self, link: Link, damage: Damages) -> None:
        self._link = link
        self._damage = damage
        self.max_arrivals = link.max_arrivals

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Op:
        return self._damage.send(slot, nbytes, header, lambda head: self._link.send(slot, nbytes, seq, head))

    def recv(self, nbytes: int, seq: int) -> Arrival:
        raise AssertionError("the sending end receives nothing")

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()


class FaultyLinkFactory:
    """Links whose messages are damaged."""

    def __init__(self, factory: LinkFactory, damage: Damages) -> None:
        self._factory = factory
        self._damage = damage

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        return self._factory.obstacle(ours, theirs)

    def new_slot(self, nbytes: int) -> Slot:
        return self._factory.new_slot(nbytes)

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        link = self._factory.build(spec, on_dead, block=block)
        return None if link is None else FaultyLink(link, self._damage)


@dataclass
class Tally:
    """What came of the transfers, by fault."""

    refused: Counter[Fault] = field(default_factory=Counter)
    """The pages did not match. The receiving node blames the sending one, which was told so."""
    harmless: Counter[Fault] = field(default_factory=Counter)
    """Every byte was there: a late write came when the message had been read."""
    wrong: list[str] = field(default_factory=list)
    """Damaged pages that were taken for whole ones, and transfers that ended otherwise."""


def fuzz(path: Path, num_faults: int, seed: int) -> Tally:
    """Move `num_faults` transfers, each of them damaged."""
    options, damage, tally = real(path.backend), Damage(seed), Tally()
    honest = transports(options)
    factories = {name: FaultyLinkFactory(made, damage) for name, made in honest.factories.items()}
    pair = LinkPair(
        options,
        p_transports=dataclasses.replace(honest, factories=factories),
        d_transports=honest,
        mover=path.new_mover(),
    )
    try:
        pair.moves_pages(num_faults)  # a link over which no chunk has come intact is given up
        pair.until(lambda: key(num_faults) in pair.sent)
        for ends in (pair.received, pair.sent, pair.ready):
            ends.clear()
        damage.begun = True
        for first in range(0, num_faults, BATCH):
            _move(pair, range(first, min(first + BATCH, num_faults)), damage, tally)
            if first % (BATCH * 512) == 0:
                print(f"  {first} of {num_faults}", file=sys.stderr)
        assert pair.d.num_links_opened == 1, "a link was lost"
    finally:
        pair.close()
    return tally


def _move(pair: LinkPair, numbers: range, damage: Damage, tally: Tally) -> None:
    pair.d_pool.buffer_LSNHPD.zero_()
    pages = {key(n): [1 + PAGES * i + page for page in range(PAGES)] for i, n in enumerate(numbers)}
    for of, page_ids in pages.items():
        pair.d.open(of, "p0", page_ids, 0)
        pair.p.open(of, "d0")
    unoffered, deadline = set(pages), time.monotonic() + 60
    while len(pair.received) < len(pages) or len(pair.sent) < len(pages):
        assert time.monotonic() < deadline, f"of {numbers} some never ended"
        pair.woken.wait(0.05)
        pair.woken.clear()
        pair.step()
        for of in unoffered & pair.ready.keys():
            unoffered.remove(of)
            pair.p.offer(of, pages[of])
            pair.p.handoff(of, handoff(of, PAGES))
    for of, page_ids in pages.items():
        _judge(pair, of, page_ids, damage.faults.pop(xxhash.xxh3_64_intdigest(str(of).encode())), tally)
    assert not damage.faults
    for ends in (pair.received, pair.sent, pair.ready):
        ends.clear()


def _judge(pair: LinkPair, of: ReqKey, page_ids: list[int], fault: Fault, tally: Tally) -> None:
    end, sent = pair.received[of], pair.sent[of]
    if isinstance(end, Received):
        equal = torch.equal(
            pair.d_pool.buffer_LSNHPD[:, :, page_ids], pair.p_pool.buffer_LSNHPD[:, :, page_ids]
        )
        if equal and fault in LATE and sent.ok:
            tally.harmless[fault] += 1
        else:
            tally.wrong.append(f"{fault} arrived as whole in transfer {of}")
    elif end.corrupt and end.sender == "p0" and not end.by_peer and sent.corrupt:
        tally.refused[fault] += 1
    else:
        tally.wrong.append(f"{fault} ended transfer {of} with {end} and {sent}")


def run() -> Iterator[dict[str, object]]:
    """All paths, NUM_FAULTS each."""
    logging.getLogger("baton").setLevel(logging.ERROR)  # each refused transfer is a warning
    torch.set_num_threads(1)
    for name, path in PATHS.items():
        start, seed = time.monotonic(), random.randrange(1 << 32)
        print(f"  {name}, seed {seed}", file=sys.stderr)
        tally = fuzz(path, NUM_FAULTS, seed)
        yield {
            "path": name,
            "seed": seed,
            "faults": NUM_FAULTS,
            "refused": dict(tally.refused),
            "harmless": dict(tally.harmless),
            "wrong": len(tally.wrong),
            "seconds": round(time.monotonic() - start, 1),
        }
        assert not tally.wrong, tally.wrong[:10]
