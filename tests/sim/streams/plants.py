"""Parts with one step left out: the races that the simulator must find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shared.device_streams import DeviceStreams, StreamEvent
from shared.engine.cuda.forward_stream import CudaForwardStream, CudaPending
from shared.engine.input_block import InputBlock
from shared.engine.model_runner import Forwarded, ModelRunner
from shared.engine.sampling_inputs import VocabMask
from shared.engine.uploads import StartCopy, Uploads
from shared.kernels.triton.pages import TritonPageMover
from shared.kvcache.allocator import PageAllocator, PageCopy
from shared.kvcache.host_pool import HostKVPool
from shared.kvcache.page_digest import chunk_digest
from shared.kvcache.page_mover import TorchPageMover
from shared.kvtransfer.link import Arrival, Link, LinkSpec, Op
from shared.kvtransfer.staging import Slot
from shared.scheduling.commit import Sampled
from tests.fake_link import FakeLinkFactory
from tests.sim.streams.device import FakeGpu
from tests.sim.streams.engine import copy_pages
from tests.sim.streams.tensors import DEVICE, FakeTorch


class Passed:
    """An event of the past."""

    def synchronize(self) -> None: ...

    def seconds_since(self, earlier: StreamEvent) -> float:
        return 0.0


class FenceThatIsOpen(CudaForwardStream):
    """What a launch had queued before it raised is not waited for: its epoch retires too early."""

    def fence(self) -> CudaPending[None]:
        return CudaPending(Passed(), lambda: None)


class AllocatorWithoutEpochs(PageAllocator):
    """A freed page goes to an arrival at once, while a forward may use it."""

    def free(self, page_ids: Iterable[int]) -> None:
        self._free.extend(page_ids)


class ChunksWithoutEvent(CudaForwardStream):
    """A forward that samples nothing counts as done when it is launched, so its pages are gathered too early."""

    def sample(
        self, forwarded: Forwarded, vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> CudaPending[Sampled]:
        result = super().sample(forwarded, vocab_mask)
        return result if forwarded.logits_SV is not None else replace(result, done=Passed())


class OneHostBlock(InputBlock):
    """All forwards are packed into one host block, which is filled again before its copy is done."""

    def __init__(
        self, nbytes: int, num_rows: int, page_size: int, device: torch.device, start_copy: StartCopy
    ) -> None:
        super().__init__(nbytes, num_rows, page_size, device, without_event(start_copy))
        del self._ring._hosts[1:], self._ring._copied[1:]


class OneUploadBlock(Uploads):
    """The same for the parameters of sampling."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        tensors = super().send(arrays)
        if self._ring is not None:
            del self._ring._hosts[1:], self._ring._copied[1:]
        return tensors


class UploadsOfOneBlock(CudaForwardStream):
    """Samples by a runner with OneUploadBlock."""

    def __init__(self, runner: ModelRunner, host_pool: HostKVPool | None, gpu: FakeGpu) -> None:
        super().__init__(runner, host_pool, gpu)
        runner._uploads = OneUploadBlock(DEVICE, without_event(gpu.start_copy))


def without_event(start_copy: StartCopy) -> StartCopy:
    """Copies that count as done when they are queued."""

    def copy(to: torch.Tensor, source: torch.Tensor) -> Passed:
        start_copy(to, source)
        return Passed()

    return copy


class ScatterWithoutEvent(TritonPageMover):
    """A scatter counts as done when it is launched, and no later forward waits for it."""

    def __init__(self, gpu: FakeGpu, torch_mode: FakeTorch) -> None:
        super().__init__(DEVICE, gpu, partial(copy_pages, torch_mode))
        self._gpu = gpu
        self._copy = partial(copy_pages, torch_mode)

    def scatter(
        self,
        pages_RPN: torch.Tensor,
        rows: range,
        page_ids: Sequence[int],
        src: torch.Tensor,
        seed: int | None = None,
    ) -> int:
        assert seed is not None
        parts = [0] * (len(rows) * len(page_ids))
        words = torch.tensor([seed - (1 << 64) if seed >> 63 else seed, *page_ids, *parts])
        arrived = src.view(-1).clone()
        self._gpu.current().synchronize()
        with self._gpu.new().use():
            self._copy(pages_RPN, rows, arrived, words, scatter=True)
        return chunk_digest(src, pages_RPN.shape[2], seed)


class MoverWithoutOrder(TritonPageMover):
    """A copy does not wait for what the calling thread has queued, such as the zeros of a new slot."""

    def __init__(self, gpu: FakeGpu, torch_mode: FakeTorch) -> None:
        super().__init__(DEVICE, gpu, partial(copy_pages, torch_mode))
        self._gpu = gpu

    def gather(self, *args: Any) -> Any:
        with self._gpu.new().use():
            return super().gather(*args)

    def scatter(self, *args: Any) -> int:
        with self._gpu.new().use():
            return super().scatter(*args)


class GatherNotWaitedFor(TritonPageMover):
    """A gather counts as done when it is launched, so its pages and its slot are used by others too early."""

    def __init__(self, gpu: FakeGpu, torch_mode: FakeTorch) -> None:
        super().__init__(DEVICE, gpu, partial(copy_pages, torch_mode))

    def gather(self, *args: Any) -> Any:
        gather: Any = super().gather(*args)
        gather.lane._done = Passed()
        return gather


class MoverThatRunsOn(TorchPageMover):
    """A copy that raises half-way leaves what it has queued to run."""

    def __init__(self, gpu: FakeGpu, torch_mode: FakeTorch) -> None:
        super().__init__(None)


class CopiesOnDefaultStream(CudaForwardStream):
    """The KV of retracted requests is copied on the stream of the calling thread, which is the default stream."""

    def copy(self, pages: PageCopy) -> CudaPending[float]:
        assert self._host_pool is not None
        started = self._stream.record(timed=True)
        self._host_pool.copy(pages)
        done = self._stream.record(timed=True)
        return CudaPending(done, lambda: done.seconds_since(started))


class ResultsOnSideStream(CudaForwardStream):
    """Tokens go to the host on a second stream, behind an event, and their memory is freed before that has run."""

    def __init__(self, runner: ModelRunner, host_pool: HostKVPool | None, streams: DeviceStreams) -> None:
        super().__init__(runner, host_pool, streams)
        self._side = streams.new()

    def sample(
        self, forwarded: Forwarded, vocab_mask: VocabMask[np.ndarray] | None = None
    ) -> CudaPending[Sampled]:
        with self._stream.use():
            sampled = self._runner.sample(forwarded, vocab_mask)
        self._side.wait(self._stream.record())
        with self._side.use():
            on_host = sampled.map(lambda tensor: tensor.to("cpu", non_blocking=True))
        return CudaPending(self._side.record(), on_host.as_values)


class LinksAbortedLate(FakeLinkFactory):
    """A link whose abort has no effect before it is closed, which is after its ring is free."""

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        link = super().build(spec, on_dead, block=block)
        return None if link is None else LinkAbortedLate(link)


@dataclass(frozen=True)
class LinkAbortedLate:
    link: Link

    @property
    def max_arrivals(self) -> int:
        return self.link.max_arrivals

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Op:
        return self.link.send(slot, nbytes, seq, header)

    def recv(self, nbytes: int, seq: int) -> Arrival:
        return self.link.recv(nbytes, seq)

    def abort(self) -> None: ...

    def close(self) -> None:
        self.link.close()
