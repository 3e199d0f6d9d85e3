"""Staging: pages are cut into chunks, which pass through slots, so data never lands in KV pages directly.

A message that arrives lies in a slot (the receiver's own, or the sender's where both share memory) until the chunk
is scattered or dropped, so a cancelled transfer gives its pages back at once and a late write can corrupt no page.
On the sending side pages are free again as soon as they are gathered into a slot. One ring belongs to one link; a
slot that a stuck op may still read or write stays out of the ring until that op has left (or for good, with the
dead link's ring).

A chunk is some pages of some layers, layer-major, K before V. One page of all layers may be larger than a slot: then
a chunk holds a part of the layers. It has 64 bytes of header, which travel in host memory, and a payload, which lies
in the slot. The header names the transfer, the message, and the layers and pages of the sequence. Its last 8 bytes
are the digest of the payload, seeded with all of that. The digest is taken from the pages while they are gathered,
and again from what a scatter writes, so it covers all that is between.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash

from shared.errors import ConfigError, LinkError
from shared.protocol.messages import KVLayout, ReqKey

HEADER_NBYTES = 64
_MAGIC = 0x314B5642  # "BVK1"
_FIELDS = struct.Struct("<IIQQIIII")  # magic, flag, seq, key, first_page, num_pages, first_layer, num_layers
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = HEADER_NBYTES - _DIGEST.size


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages [first_page, first_page + num_pages) of a sequence, of layers [first_layer, first_layer + num_layers)."""

    first_page: int
    num_pages: int
    first_layer: int
    num_layers: int

    @property
    def units(self) -> int:
        """Pages times layers: what progress is counted in."""
        return self.num_pages * self.num_layers


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How pages of one group of layers are cut: at most `pages_per_chunk` pages of `layers_per_chunk` layers."""

    num_layers: int
    layers_per_chunk: int
    pages_per_chunk: int
    first_layer: int = 0

    @classmethod
    def fit(cls, *, num_layers: int, unit_nbytes: int, slot_nbytes: int, first_layer: int = 0) -> ChunkPlan:
        """Fill slots as well as possible; `unit_nbytes` is K and V of one page of one layer."""
        if num_layers == 0:
            return cls(0, 1, 1)
        layers = min(num_layers, slot_nbytes // unit_nbytes)
        if layers == 0:
            raise ConfigError(
                f"one page of one layer takes {unit_nbytes} bytes and does not fit a staging slot of {slot_nbytes}; "
                "raise --kv-slot-bytes or lower --page-size"
            )
        num_parts = -(-num_layers // layers)
        layers = -(-num_layers // num_parts)  # parts of equal size, so that no part is a small remainder
        return cls(num_layers, layers, slot_nbytes // (unit_nbytes * layers), first_layer)

    @classmethod
    def of_groups(cls, layout: KVLayout, *, unit_nbytes: int, slot_nbytes: int) -> tuple[ChunkPlan, ...]:
        """One for each group of layers, in their order."""
        num_windows = layout.num_window_layers
        num_full = layout.num_layers - num_windows
        full = cls.fit(num_layers=num_full, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes)
        if not num_windows:
            return (full,)
        return full, cls.fit(
            num_layers=num_windows, unit_nbytes=unit_nbytes, slot_nbytes=slot_nbytes, first_layer=num_full
        )

    def cut(self, first_page: int, num_pages: int) -> Iterator[Chunk]:
        """Chunks that cover every (page, layer) of the range exactly once, in the order of the pages."""
        end_page = first_page + num_pages
        for page in range(first_page, end_page, self.pages_per_chunk):
            pages = min(self.pages_per_chunk, end_page - page)
            for layer in range(0, self.num_layers, self.layers_per_chunk):
                num_layers = min(self.layers_per_chunk, self.num_layers - layer)
                yield Chunk(page, pages, self.first_layer + layer, num_layers)


class Flag(IntEnum):
    """What the payload of a chunk is."""

    PAGES = 1
    VOID = 2
    """Nothing: the transfer was given up after its Grant, and this drains the posted receive."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Which chunk of which transfer a message must be: both ends know it from the Grant."""

    key: ReqKey
    chunk: Chunk
    seq: int

    @property
    def seed(self) -> int:
        """The seed of the digest of the chunk's pages."""
        return xxhash.xxh3_64_intdigest(self.fields(Flag.PAGES))

    @property
    def void_digest(self) -> int:
        """What stands in place of a digest when the chunk is void, so that no pages become void by a flipped bit."""
        return xxhash.xxh3_64_intdigest(self.fields(Flag.VOID))

    def fields(self, flag: Flag) -> bytes:
        """The header without the digest."""
        key, c = xxhash.xxh3_64_intdigest(str(self.key).encode()), self.chunk
        chunk = (c.first_page, c.num_pages, c.first_layer, c.num_layers)
        return _FIELDS.pack(_MAGIC, flag, self.seq, key, *chunk).ljust(_DIGEST_AT, b"\0")

    def seal(self, digest: int | None) -> bytes:
        """The header of a message whose payload has this `digest`; None: it is void."""
        if digest is None:
            return self.fields(Flag.VOID) + _DIGEST.pack(self.void_digest)
        return self.fields(Flag.PAGES) + _DIGEST.pack(digest)

    def open(self, header: bytes) -> int | None:
        """The digest that the payload of the message with this `header` must have; None: it is void.

        LinkError: this is another message than the one that was granted, so the two ends disagree on order.
        """
        (digest,) = _DIGEST.unpack(header[_DIGEST_AT:])
        if header.startswith(self.fields(Flag.PAGES)):
            return int(digest)
        if header.startswith(self.fields(Flag.VOID)) and digest == self.void_digest:
            return None
        raise LinkError(f"message {self.seq} is not the chunk that was granted: header {header.hex()}")


class Slot:
    """One staging buffer for payloads, in host or device memory, aligned for any element type."""

    header: bytes = b""
    """That of the message that has arrived here, if this end owns the slot."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        # Most messages of a link have the same length, and making a view for each costs microseconds.
        self._payload = buffer[:0]

    def payload(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes`: the pages of a message."""
        if self._payload.numel() != nbytes:
            self._payload = self.buffer[:nbytes]
        return self._payload


class SlotRing:
    """The free slots of one link. Memory is taken on first use, on the thread that uses it."""

    def __init__(self, num_slots: int, slot_nbytes: int, new_slot: Callable[[int], Slot]) -> None:
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._new_slot = new_slot
        self._free: list[Slot] = []
        """Last in, first out: most of the memory of the newest one is still in a cache."""
        self._num_made = 0

    @property
    def num_out(self) -> int:
        """Slots that an op, or a chunk being gathered or scattered, holds."""
        return self._num_made - len(self._free)

    def take(self) -> Slot | None:
        """A free slot, or None."""
        if self._free:
            return self._free.pop()
        if self._num_made == self.num_slots:
            return None
        slot = self._new_slot(self.slot_nbytes)
        self._num_made += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """Take back a slot that no op can touch any more."""
        assert self.num_out > 0
        self._free.append(slot)

    def close(self) -> None:
        """Let go of the memory: the link is gone, and every slot is back."""
        assert self.num_out == 0
        self._free.clear()
        self._num_made = self.num_slots = 0
