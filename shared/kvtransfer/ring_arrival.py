"""Receiving into slots of the link's own: what all links do that do not share memory with their peer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.kvtransfer.link import Op
from shared.kvtransfer.staging import Slot, SlotRing


class RingArrival:
    """A receive into a slot of `ring`, which has the slot back when the message is released."""

    def __init__(self, op: Op, slot: Slot, ring: SlotRing) -> None:
        self.slot = slot
        self._op = op
        self._ring = ring

    def wait(self, *, block: bool) -> bool:
        """See Op."""
        return self._op.wait(block=block)

    def release(self) -> None:
        """See Arrival."""
        self._ring.give_back(self.slot)


def receive_into(ring: SlotRing, nbytes: int, start: Callable[[torch.Tensor], Op]) -> RingArrival:
    """Take a slot and `start` a receive into it; the slot goes back if that raises."""
    slot = ring.take()
    assert slot is not None, "more arrivals than slots"
    try:
        op = start(slot.message(nbytes))
    except BaseException:
        ring.give_back(slot)
        raise
    return RingArrival(op, slot, ring)
