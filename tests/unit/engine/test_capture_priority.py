"""The priority of captured kernels, over streams and graphs that keep to what CUDA and PyTorch document.

A node of a graph runs with the priority of the stream that it was captured on (`cudaLaunchAttributePriority`),
whatever the stream of the replay (https://github.com/pytorch/pytorch/issues/167346).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from shared.cuda_streams import CudaStreams
from shared.device_streams import FORWARD_PRIORITY
from shared.engine.cuda.cuda_graphs import CudaGraphPool

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Stream:
    device: torch.device
    priority: int = 0

    def synchronize(self) -> None:
        pass


@dataclass
class Gpu:
    """The current stream, and the priority of each kernel that has run."""

    current: Stream = field(default_factory=lambda: Stream(DEVICE))
    recorded: list[int] | None = None
    ran: list[int] = field(default_factory=list)

    def launch(self) -> None:
        (self.ran if self.recorded is None else self.recorded).append(self.current.priority)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Graph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.recorded = graph.priorities
        with self.stream(stream):
            yield
        self.recorded = None


@dataclass
class Graph:
    priorities: list[int] = field(default_factory=list)


def test_replayed_kernels_have_the_priority_of_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    for name, fake in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": gpu.stream,
        "graph": gpu.graph,
        "graph_pool_handle": object,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graph = CudaGraphPool(DEVICE).capture(gpu.launch)
    assert isinstance(graph, Graph)
    assert graph.priorities == [FORWARD_PRIORITY] == gpu.ran
    with CudaStreams(DEVICE, priority=FORWARD_PRIORITY).new().use():
        gpu.launch()
    assert gpu.ran[1:] == graph.priorities, "an eager forward's kernels and a replayed one's"
