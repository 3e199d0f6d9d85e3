"""Forwards that were recorded once, and are queued again with one call: CUDA graphs, by buckets of shapes.

A small forward is bound by the launches of its kernels. Recorded, it is one launch. A recorded forward reads and
writes fixed addresses: the input block, the weights, the KV pool, the FutureMap, and the buffers of its result. It
serves every batch that fits into its shape; the rest of the shape is padding. A decode step has two graphs: where no
tile of attention is cut, one launch a layer is left out. An extend has so much to compute that it would not matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from shared import log
from shared.device_streams import FORWARD_PRIORITY
from shared.engine.input_block import BlockShape

EXTEND_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
"""Larger extends are bound by arithmetic, not by launches. From 256 tokens on, padding costs what tokens cost."""
MAX_EXTEND_SEQUENCES = 64
"""Of the shapes that are for extends: a graph computes logits for every sequence of its shape, wanted or not.

An extend that fits into the shape of a decode step first, with as many sequences as tokens, runs there.
"""


class Graph(Protocol):
    """A recorded forward."""

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""
        ...


class GraphPool(Protocol):
    """Records forwards. All of them share one pool of memory, since no two run at the same time."""

    def capture(self, forward: Callable[[], None]) -> Graph:
        """Run `forward` once, so that everything it needs is loaded, and record it. What runs is over on return.

        `forward` leaves its results in tensors that exist before.
        """
        ...

    def free_nbytes(self) -> int:
        """Memory of the device that no process uses."""
        ...


class CudaGraphPool:
    """CUDA's graphs. Capturing does not disturb other threads that use the device, nor they the capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # A replayed kernel has the priority of the stream that it was captured on, and not of the one of the replay.
        self._stream = torch.cuda.Stream(device, FORWARD_PRIORITY)  # type: ignore[no-untyped-call]

    def capture(self, forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture on a stream of the pool's own."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            forward()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            forward()
        return graph

    def free_nbytes(self) -> int:
        """What the driver says, once torch has given back what it keeps for itself."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


def graph_shapes(max_bs: int, max_tokens: int) -> tuple[BlockShape, ...]:
    """The shapes that are captured, in ascending order.

    Decode steps of 1, 2, 4, 8, 16, 24 .. `max_bs` sequences, and extends of `EXTEND_TOKENS` until one holds
    `max_tokens`. The two differ in nothing but their shapes: an extend may run in the graph of a decode step, and the
    reverse.
    """
    sizes = {size for size in (1, 2, 4, *range(8, max_bs, 8)) if size < max_bs} | {max_bs}
    shapes = {BlockShape(size, size) for size in sizes}
    for smaller, size in zip((0, *EXTEND_TOKENS), EXTEND_TOKENS, strict=False):
        if smaller < max_tokens:
            shapes.add(BlockShape(size, min(size, MAX_EXTEND_SEQUENCES, max_bs)))
    return tuple(sorted(shapes))


ForwardOf = Callable[[BlockShape, bool], Callable[[], None]]
"""The forward of a shape whose work may be cut, or is not (`AttentionBackend.is_cut`)."""


class Graphs:
    """The graphs of one engine."""

    def __init__(self, pool: GraphPool, shapes: Sequence[BlockShape]) -> None:
        self._pool = pool
        self.shapes = tuple(sorted(shapes))
        self._kinds = [
            (shape, may_cut)
            for shape in reversed(self.shapes)
            for may_cut in ((True, False) if shape.num_tokens == shape.num_sequences else (True,))
        ]
        """What is captured, the largest first: the memory of its forward then serves all others."""
        self._graphs: dict[tuple[BlockShape, bool], Graph] = {}

    def capture(self, forward_of: ForwardOf) -> None:
        """Capture every shape, that of a decode step also for work that is not cut."""
        for kind in self._kinds:
            self._graphs[kind] = self._pool.capture(forward_of(*kind))
        log.event("cuda_graphs_captured", graphs=len(self._kinds), largest=self.shapes[-1])

    def measure(self, forward_of: ForwardOf) -> int:
        """Estimate the bytes that `capture` takes: the largest graph, and what the next one adds for each other."""
        free, graphs = [self._pool.free_nbytes()], []
        for kind in self._kinds[:2]:
            graphs.append(self._pool.capture(forward_of(*kind)))
            free.append(self._pool.free_nbytes())
        largest, *others = (before - after for before, after in pairwise(free))
        return largest + sum(others) * (len(self._kinds) - 1)

    def shape_for(self, shape: BlockShape) -> BlockShape | None:
        """The smallest captured shape that a forward of `shape` can be padded to; None if it is too large."""
        first = bisect_left(self.shapes, shape)
        return next(
            (other for other in self.shapes[first:] if (other, True) in self._graphs and other.holds(shape)),
            None,
        )

    def replay(self, shape: BlockShape, may_cut: bool) -> None:
        """Queue the graph of `shape` behind the input block that was filled for it, with work that is cut or not."""
        self._graphs[(shape, may_cut) if (shape, may_cut) in self._graphs else (shape, True)].replay()
