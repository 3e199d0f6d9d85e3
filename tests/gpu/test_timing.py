"""Times on a GPU's clock, of a GPU that is numbers: launches are no part of them, however long they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gpu import timing

CYCLES_A_MS = 2_000_000


@dataclass
class Gpu:
    """Stands for `torch.cuda`. Milliseconds of the host, and of the end of all that is queued."""

    host: float = 0.0
    queued: float = 0.0

    def synchronize(self) -> None:
        self.host = max(self.host, self.queued)

    def _sleep(self, cycles: int) -> None:
        self.queued = max(self.queued, self.host) + cycles / CYCLES_A_MS

    def launch(self, launch_ms: float, ms: float) -> None:
        self.host += launch_ms
        self.queued = max(self.queued, self.host) + ms


@dataclass
class Event:
    gpu: Gpu
    at: float = field(default=0.0)

    def record(self) -> None:
        self.at = max(self.gpu.queued, self.gpu.host)

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake: Any = Gpu()
    fake.Event = lambda enable_timing: Event(fake)
    monkeypatch.setattr(timing.torch, "cuda", fake)
    return fake  # type: ignore[no-any-return]


@pytest.mark.parametrize("launch_ms", [1, 20, 100])
def test_launches_are_no_part_of_a_time(gpu: Gpu, launch_ms: float) -> None:
    seconds = timing.seconds_of(lambda i: gpu.launch(launch_ms, 3), "cuda", repeats=2, warm_up=0)
    assert seconds == pytest.approx(0.003)


def test_launches_that_no_pause_outlasts_give_no_time(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="2 launches of what is timed outlast a pause"):
        timing.seconds_of(lambda i: gpu.launch(1e4, 3), "cuda", repeats=2, warm_up=0)
