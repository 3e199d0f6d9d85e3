"""What a rehearsal measures and what it takes. `test_transports` has what follows when one fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

from shared.device_streams import StreamEvent
from shared.errors import LinkError
from shared.kvtransfer.link import RECEIVER, Arrival, LinkSpec, Op
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.staging import Slot, SlotRing
from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory
from shared.kvtransfer.transports.rehearsal import Rehearsal
from tests.fake_cuda import FakeRuntime
from tests.unit.kvtransfer.link_pair import CPU, NCCL, ON_A_CPU, LinkPair, over_fake_cuda, real, transports

OPTIONS = replace(real("cuda-ipc"), num_slots=3, slot_nbytes=64 << 10)


class Log:
    """What a receiving node does with its device, in order. It stands for streams, for a stream, and for a clock."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._now = 0.0

    def new(self) -> Log:
        return self

    def current(self) -> Log:
        return self

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def clock(self) -> float:
        self.done.append("clock")
        self._now += 2.0**-10
        return self._now

    def use(self) -> AbstractContextManager[object]:
        raise AssertionError("a rehearsal runs on the stream of its thread")

    def record(self, *, timed: bool = False) -> StreamEvent:
        raise AssertionError("a rehearsal has nothing to order")

    def wait(self, event: StreamEvent) -> None:
        raise AssertionError("a rehearsal has nothing to order")


class Mapped(torch.Tensor):
    """Memory of the peer, which notes copies from it."""

    done: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            cls.done.append(f"copy {args[1].numel()}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Runtime(FakeRuntime):
    """Notes what is mapped."""

    def __init__(self, mapped: type[Mapped]) -> None:
        super().__init__()
        self._mapped = mapped

    def open(self, handle: bytes) -> torch.Tensor:
        self._mapped.done.append("map")
        return super().open(handle).as_subclass(self._mapped)


def test_what_is_timed_is_the_reading_of_every_byte_and_no_mapping() -> None:
    log = Log()
    mapped = type("MappedAndNoted", (Mapped,), {"done": log.done})
    d = replace(over_fake_cuda(OPTIONS, Runtime(mapped)), rehearse=Rehearsal(CPU, log, log.clock))
    with closing(LinkPair(OPTIONS, p_transports=transports(OPTIONS), d_transports=d)) as pair:
        pair.until(pair.linked)
        (report,) = pair.d.link_reports
    clocks = [at for at, what in enumerate(log.done) if what == "clock"]
    timed = [log.done[start + 1 : end] for start, end in pairwise(clocks)][::2]
    small, large = "copy 4096", "copy 65536"
    assert timed == [
        ["map", small, "map", small, "map", small, "synchronize"],
        *[[small, "synchronize"]] * 3,
        [large, large, large, "synchronize"],
    ]
    assert (report.gb_s, report.latency_ms) == (0.2013, 0.977)


class Peer:
    """A sending node that says one thing, and a link over which nothing comes."""

    max_arrivals = 256

    def __init__(self, *, num_messages: int, nbytes: int) -> None:
        self.said: dict[str, bytes] = {}
        self.store = LinkStore(self._hear, timeout_s=60.0)
        self.store.feed(
            "rehearsal/sizes", msgspec.msgpack.encode({"num_messages": num_messages, "nbytes": nbytes})
        )

    def _hear(self, name: str, value: bytes) -> None:
        self.said[name] = value
        self.store.abort("heard")

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Op:
        raise AssertionError("this end receives")

    def recv(self, nbytes: int, seq: int) -> Arrival:
        raise AssertionError("nothing is ready")

    def abort(self) -> None:
        return

    def close(self) -> None:
        return

    def rehearse(self) -> None:
        ring = SlotRing(1, 1 << 30, lambda nbytes: Slot(torch.empty(nbytes, dtype=torch.uint8)))
        spec = LinkSpec(name="l", rank=RECEIVER, secret=b"", store=self.store, ring=ring)
        Rehearsal(CPU)(self, spec, lambda reason: None)


@pytest.mark.parametrize("num_slots", [2, 64])
def test_large_slots_are_not_rehearsed_whole(num_slots: int) -> None:
    peer = Peer(num_messages=num_slots, nbytes=1 << 30)
    with pytest.raises(LinkError, match="rehearsal: heard"):
        peer.rehearse()
    agreed = msgspec.msgpack.decode(peer.said["rehearsal/agreed"])
    assert agreed["num_messages"] * agreed["nbytes"] == 128 << 20


@pytest.mark.parametrize(("num_messages", "nbytes"), [(0, 4096), (1, 0), (-1, 1 << 20)])
def test_a_peer_without_slots_fails_its_link(num_messages: int, nbytes: int) -> None:
    peer = Peer(num_messages=num_messages, nbytes=nbytes)
    with pytest.raises(LinkError, match="rehearsal: Expected `int` >="):
        peer.rehearse()


class FullGpu(NcclLinkFactory):
    """On a GPU that has no memory left for slots."""

    def new_slot(self, nbytes: int) -> Slot:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")


@pytest.mark.parametrize("full", ["p", "d"])
def test_a_gpu_without_memory_for_slots_passes_the_transport_over(
    full: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(real("auto"), slot_nbytes=64 << 10)
    both = {}
    for name in "pd":
        nccl = transports(replace(options, backend="nccl"))
        gloo = transports(replace(options, backend="gloo"))
        factories = {**nccl.factories, **gloo.factories}
        if name == full:
            factories["nccl"] = FullGpu(options, CPU, NCCL.new_group, ON_A_CPU)
        both[name] = replace(nccl, factories=factories)
    with closing(LinkPair(options, p_transports=both["p"], d_transports=both["d"])) as pair:
        pair.until(pair.linked)
        (report,) = (pair.p if full == "p" else pair.d).link_reports
        assert report.transport == "gloo"
        assert "rehearsal: CUDA out of memory" in report.passed_over["nccl"]
        assert "link_defect" not in caplog.text
