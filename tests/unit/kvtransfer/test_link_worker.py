"""The end of a link when kernels outlive the host's patience, as those of NCCL do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.errors import LinkError
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.staging import Chunk, Slot
from tests.unit.kvtransfer.lone_link import (
    KEY,
    LoneFactory,
    grant,
    receive_worker,
    run_to_its_end,
    send_worker,
)
from tests.unit.kvtransfer.looks import slots_out


class TimedOut:
    """A send or receive of which the host has given up, while its kernel uses the slot."""

    slot = header = None

    def __init__(self, release: Callable[[], None] = lambda: None) -> None:
        self.release = release

    def wait(self, *, block: bool) -> bool:
        raise LinkError("timed out")


@dataclass
class StuckLink:
    """A communicator whose peer says nothing. Kernels use their slots until the first abort."""

    slots_out: Callable[[], int] = lambda: 0
    max_arrivals: int = 2
    num_kernels: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Each with the number of slots that were out."""

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Any:
        self.num_kernels += 1
        return TimedOut()

    def recv(self, nbytes: int, seq: int) -> Any:
        self.num_kernels += 1
        return TimedOut()

    def abort(self) -> None:
        self.calls.append(("abort", self.slots_out()))

    def close(self) -> None:
        self.calls.append(("close", self.slots_out()))


def sending(factory: LoneFactory) -> LinkWorker:
    worker = send_worker(factory)
    worker.accept(grant(0))
    return worker


def receiving(factory: LoneFactory) -> LinkWorker:
    worker = receive_worker(factory)
    worker.enqueue(KEY, [Chunk(0, 1, 0, 1)], bulk=False)
    return worker


@pytest.mark.parametrize("new_worker", [sending, receiving])
def test_a_link_that_timed_out_is_aborted_before_its_slots_are_free(
    new_worker: Callable[[LoneFactory], LinkWorker],
) -> None:
    link = StuckLink()
    worker = new_worker(LoneFactory(link))
    link.slots_out = lambda: slots_out(worker)
    assert run_to_its_end(worker).startswith("timed out")
    assert link.num_kernels == 1
    assert link.calls == [("abort", 1), ("close", 0)]
