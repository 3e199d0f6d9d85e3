"""One end of a link, which the test steps, over a data path, pages and a side that only take notes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link import Link, LinkSpec
from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.receive_worker import ReceiveWorker
from shared.kvtransfer.send_worker import SendWorker
from shared.kvtransfer.staging import Chunk, Slot
from shared.kvtransfer.transports.choice import Transports
from shared.kvtransfer.transports.common import ThreadRunner
from shared.protocol.messages import KVLayout, NodeRef, ReqKey, Struct
from shared.protocol.transfer_messages import Grant, GrantedChunk, LinkOpen, Place
from tests.patience import PATIENCE_S

KEY = ReqKey("router", "a", 0)
PAGE_NBYTES = 8


def new_slot(nbytes: int) -> Slot:
    return Slot(torch.zeros(nbytes, dtype=torch.uint8))


@dataclass
class LoneFactory:
    """Builds `link`."""

    link: Any = None
    new_slot: Callable[[int], Slot] = new_slot

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        return self.link

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        raise AssertionError("chosen by the test")


class Pages:
    """Two layers, whose pages have their own numbers as content; `failure` is raised by gathers."""

    failure: Exception | None = None

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return num_pages * num_layers * PAGE_NBYTES

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        if self.failure is not None:
            raise self.failure
        out.fill_(page_ids[0])
        return 0

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        return 0


@dataclass
class Owner:
    """A side that wants everything, and an outbox. `hurried`: pages that are no bulk are on their way elsewhere."""

    hurried: bool = False
    granted: list[tuple[ReqKey, int]] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    """Pages between the begin and the end of a copy."""

    def send(self, to: str, message: Struct) -> None:
        if isinstance(message, Grant):
            self.granted += [(chunk.key, chunk.first_page) for chunk in message.chunks]

    def end_link(self, link: LinkWorker, reason: str, *, tell_peer: bool = True) -> None:
        if link.death is None:
            link.stop(reason)

    def begin_gather(self, key: ReqKey, chunk: Chunk) -> list[int] | None:
        self.in_use.append(chunk.first_page)
        return [chunk.first_page]

    begin_scatter = begin_gather

    def end_gather(self, key: ReqKey, chunk: Chunk, nbytes: int) -> None:
        self.in_use.remove(chunk.first_page)

    end_scatter = end_gather

    def wants(self, key: ReqKey) -> bool:
        return True

    def is_hurried(self) -> bool:
        return self.hurried

    def refused(self, key: ReqKey, reason: str, *, corrupt: bool = False) -> None:
        raise AssertionError(reason)


def _new(kind: Any, factory: Any, pages: Pages | None, owner: Owner | None, num_slots: int = 2) -> Any:
    owner = owner or Owner()
    runner = ThreadRunner(DeviceThreads())
    end = Endpoint(
        node=NodeRef("n", "n", ""),
        layout=KVLayout("f00d", "uint8", 1, 2, 1, 1, windows=(0, 4)),
        pages=pages or Pages(),
        outbox=owner,
        transports=Transports({"nccl": factory}, runner, slot_nbytes=PAGE_NBYTES),
        clock=time.monotonic,
        options=TransferOptions(num_slots=num_slots, build_timeout_s=PATIENCE_S),
        wake=lambda: None,
    )
    return kind(end, "p", LinkOpen("l", end.node, b"", "nccl"), owner)


def send_worker(
    factory: Any, pages: Pages | None = None, owner: Owner | None = None, num_slots: int = 2
) -> SendWorker:
    worker: SendWorker = _new(SendWorker, factory, pages, owner, num_slots)
    return worker


def receive_worker(factory: Any, owner: Owner | None = None) -> ReceiveWorker:
    worker: ReceiveWorker = _new(ReceiveWorker, factory, None, owner)
    return worker


def grant(seq: int, num_chunks: int = 1) -> Grant:
    chunks = (GrantedChunk(KEY, seq + i, 1, 0, 1, PAGE_NBYTES) for i in range(num_chunks))
    return Grant("l", seq, tuple(chunks))


def run_to_its_end(worker: LinkWorker) -> str:
    """Why it died."""
    while not worker.finished:
        worker.step(block=True)
    assert worker.death is not None
    return worker.death
