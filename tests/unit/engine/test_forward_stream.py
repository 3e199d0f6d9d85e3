"""The CPU stream: launch order, asynchrony, and failures that reach the one who waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from shared.cpu_cores import allowed_cores, can_pin
from shared.cuda_streams import CudaStreams
from shared.engine.cuda.forward_stream import CudaForwardStream
from shared.engine.forward_stream import CpuForwardStream, make_forward_stream
from shared.engine.model_runner import SampledTensors
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import SamplingInputs
from tests.patience import PATIENCE_S


def batch(number: int) -> ModelWorkerBatch:
    """Its number is its only input token."""
    return ModelWorkerBatch(
        num_decodes=0,
        input_ids=np.array([number]),
        rows_B=np.zeros(1, dtype=np.int64),
        starts_B=np.zeros(1, dtype=np.int64),
        lengths_B=np.ones(1, dtype=np.int64),
        page_table_BP=np.zeros((1, 1), dtype=np.int32),
        sampled_B=np.zeros(0, dtype=np.int64),
        sampling=SamplingInputs(),
        future_writes=(),
    )


@dataclass
class GatedRunner:
    """A model runner that computes when it is let, and returns the batch's number."""

    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    order: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    cores: set[int] = field(default_factory=set)
    fails_at: int | None = None
    device = torch.device("cpu")

    def forward(self, batch: ModelWorkerBatch) -> int:
        self.began.set()
        assert self.gate.wait(PATIENCE_S)
        number = int(batch.input_ids[0])
        self.order.append(number)
        self.threads.add(threading.get_ident())
        self.cores |= set(allowed_cores())
        if number == self.fails_at:
            raise ValueError(f"forward {number}")
        return number

    def close(self) -> None:
        pass

    def sample(self, number: int, vocab_mask: object) -> SampledTensors:
        self.threads.add(threading.get_ident())
        return SampledTensors(torch.tensor([number, number + 1]))


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def stream(runner: GatedRunner) -> Iterator[CpuForwardStream]:
    stream = CpuForwardStream(runner)  # type: ignore[arg-type]
    yield stream
    runner.gate.set()
    stream.close()


def test_submit_returns_before_the_forward_has_run(runner: GatedRunner, stream: CpuForwardStream) -> None:
    results = [stream.sample(stream.submit(batch(i))) for i in range(3)]
    assert runner.began.wait(PATIENCE_S)
    assert runner.order == []
    runner.gate.set()
    assert [result.wait().token_ids for result in results] == [[0, 1], [1, 2], [2, 3]]


def test_forwards_run_in_launch_order_on_one_thread(runner: GatedRunner, stream: CpuForwardStream) -> None:
    runner.gate.set()
    results = [stream.sample(stream.submit(batch(i))) for i in range(50)]
    assert results[-1].wait().token_ids == [49, 50]
    assert runner.order == list(range(50))
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


def test_a_failure_is_raised_by_wait_and_the_stream_goes_on(
    runner: GatedRunner, stream: CpuForwardStream
) -> None:
    runner.gate.set()
    runner.fails_at = 1
    results = [stream.sample(stream.submit(batch(i))) for i in range(3)]
    assert results[0].wait().token_ids == [0, 1]
    with pytest.raises(ValueError, match="forward 1"):
        results[1].wait()
    assert results[2].wait().token_ids == [2, 3]


def test_close_finishes_what_was_launched(runner: GatedRunner) -> None:
    stream = CpuForwardStream(runner)  # type: ignore[arg-type]
    results = [stream.sample(stream.submit(batch(i))) for i in range(5)]
    threading.Timer(0.05, runner.gate.set).start()
    stream.close()
    assert runner.order == list(range(5))
    assert results[4].wait().token_ids == [4, 5]
    assert not any(thread.name.startswith("forward") for thread in threading.enumerate())


@pytest.mark.skipif(not can_pin(), reason="threads choose their cores here")
def test_forwards_alone_stay_on_their_cores(runner: GatedRunner) -> None:
    allowed = allowed_cores()
    stream = make_forward_stream(runner, cores=allowed[-1:])  # type: ignore[arg-type]
    runner.gate.set()
    stream.sample(stream.submit(batch(1))).wait()
    stream.close()
    assert runner.cores == set(allowed[-1:])
    assert allowed_cores() == allowed


@pytest.mark.skipif(not can_pin(), reason="threads choose their cores here")
def test_where_pinning_is_refused_forwards_run_all_the_same(
    runner: GatedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_forward_stream(runner, cores=[9999])  # type: ignore[arg-type]
    runner.gate.set()
    assert stream.sample(stream.submit(batch(1))).wait().token_ids == [1, 2]
    stream.close()
    assert runner.cores == set(allowed_cores())
    assert "forward_not_pinned" in caplog.text


def test_a_cpu_runner_gets_a_cpu_stream(runner: GatedRunner) -> None:
    stream = make_forward_stream(runner)  # type: ignore[arg-type]
    assert isinstance(stream, CpuForwardStream)
    stream.close()


@dataclass
class PooledStreams:
    """As torch hands out CUDA's streams: 32 of each priority, in turn."""

    num_made: Counter[int] = field(default_factory=Counter)

    def __call__(self, device: torch.device, priority: int = 0) -> tuple[int, int]:
        self.num_made[priority] += 1
        return priority, self.num_made[priority] % 32


def test_no_link_is_handed_the_forward_stream(runner: GatedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", PooledStreams())
    runner.device = torch.device("cuda", 0)
    forwards = make_forward_stream(runner)  # type: ignore[arg-type]
    assert isinstance(forwards, CudaForwardStream)
    links = CudaStreams(runner.device)
    assert forwards._stream not in [links.new() for _ in range(40)]
