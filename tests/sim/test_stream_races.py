"""Hypothesis draws the order in which streams run; whatever it draws, no page and no slot is used by two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.triton.pages import TritonPageMover
from shared.kvcache.allocator import PageCopy
from shared.kvcache.cuda_host_pool import CudaHostKVPool, WindowedCudaHostKVPool
from shared.kvcache.page_mover import TorchPageMover
from shared.kvcache.pools import TokenToKVPool
from tests.sim.streams.device import FakeGpu, Schedule
from tests.sim.streams.engine import NewMover, copy_pages, triton_mover
from tests.sim.streams.fleet import Happening, Parts, Scenario, run
from tests.sim.streams.plants import (
    AllocatorWithoutEpochs,
    ChunksWithoutEvent,
    CopiesOnDefaultStream,
    FenceThatIsOpen,
    GatherNotWaitedFor,
    LinksAbortedLate,
    MoverThatRunsOn,
    MoverWithoutOrder,
    OneHostBlock,
    ResultsOnSideStream,
    ScatterWithoutEvent,
    UploadsOfOneBlock,
)
from tests.sim.streams.scenarios import first_of, happenings, scenarios
from tests.sim.streams.tensors import DEVICE, FakeTorch

torch.set_num_threads(1)


@settings(max_examples=40)
@given(scenarios())
def test_no_order_that_events_allow_is_a_race(scenario: Scenario) -> None:
    assert run(scenario) == []


SENDS_TIME_OUT = st.tuples(st.builds(Happening, st.integers(2, 16), st.just("time out"), st.just(0)))

PLANTED = {
    "an epoch retired before what a launch had queued": (
        Parts(make_stream=FenceThatIsOpen),
        {"happenings": happenings("no memory")},
        "free for arrivals",
    ),
    "pages that do not cool": (
        Parts(new_allocator=AllocatorWithoutEpochs),
        {"num_reqs": st.just(5), "overlap": st.just(True)},
        "free for arrivals",
    ),
    "no event between a forward and a gather": (Parts(make_stream=ChunksWithoutEvent), {}, ""),
    "no event between a scatter and a forward": (Parts(new_mover=ScatterWithoutEvent), {}, ""),
    "a gather that is not waited for": (Parts(new_mover=GatherNotWaitedFor), {}, ""),
    "a scatter that raises and runs on": (
        Parts(new_mover=MoverThatRunsOn),
        {
            "happenings": happenings("no memory"),
            "schedule": st.builds(Schedule, st.integers(0, 2**16)),
            "num_reqs": st.just(5),
            "tokens": st.just(48),
            "overlap": st.just(True),  # many scatters
        },
        "",
    ),
    "a copy that is not behind the making of its slot": (
        Parts(new_mover=MoverWithoutOrder),
        {},
        "",
    ),
    "a host block of inputs filled before its copy": (
        Parts(new_inputs=OneHostBlock),
        {"overlap": st.just(True)},
        "",
    ),
    "a host block of sampling parameters filled before its copy": (
        Parts(make_stream=UploadsOfOneBlock),
        {"overlap": st.just(True)},
        "instead of",
    ),
    "a copy on the default stream": (
        Parts(make_stream=CopiesOnDefaultStream),
        {"retract_every": st.just(5)},
        "",
    ),
    "memory freed while another stream reads it": (Parts(make_stream=ResultsOnSideStream), {}, "freed"),
    "a ring freed before its abort": (
        Parts(links=LinksAbortedLate),
        {"happenings": SENDS_TIME_OUT},
        "slot",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_race_that_was_planted_is_found(name: str) -> None:
    parts, fixed, shows_as = PLANTED[name]
    scenario = first_of(scenarios(**fixed), lambda drawn: any(shows_as in race for race in run(drawn, parts)))
    assert run(scenario) == []


def test_host_pages_of_both_groups_come_back_as_they_were() -> None:
    """A window page that a request has given up is not copied back."""
    gpu = FakeGpu(Schedule(7))
    with torch.inference_mode(), FakeTorch(gpu) as torch_mode:
        full, window = (
            TokenToKVPool(num_pages=9, page_size=2, num_layers=layers, num_kv_heads=1, head_dim=8,
                          dtype=torch.int64, device=DEVICE, mover=triton_mover(gpu, torch_mode))
            for layers in (1, 2)
        )  # fmt: skip
        for each in (full, window):
            numbers = torch.arange(each.buffer_LSNHPD.numel())
            each.buffer_LSNHPD.copy_(numbers.view(each.buffer_LSNHPD.shape))
        host = WindowedCudaHostKVPool(CudaHostKVPool(full, 5), CudaHostKVPool(window, 5))
        host.copy(PageCopy(True, (3, 8, 1), (4, 0, 1), (2, 6, 5)))
        host.copy(PageCopy(False, (2, 5, 6), (4, 0, 1), (7, 0, 4)))
        gpu.current().synchronize()
        for each, moved in ((full, {2: 3, 5: 8, 6: 1}), (window, {7: 2, 4: 5})):
            pages = each.buffer_LSNHPD.cpu()[:, :, :, 0, 0, 0]
            expected = [moved.get(page, page) for page in range(9)]
            assert (pages - pages[:, :, :1]).tolist() == [
                [[page * 16 for page in expected]] * 2
            ] * each.num_layers
    gpu.close()


def triton_mover_that_fails(gpu: FakeGpu, torch_mode: FakeTorch) -> TritonPageMover:
    """Behind its kernel there is no memory left."""

    def kernel(*args: Any, scatter: bool) -> None:
        copy_pages(torch_mode, *args, scatter=scatter)
        raise torch.OutOfMemoryError

    return TritonPageMover(DEVICE, gpu, kernel)


@pytest.mark.parametrize(
    "of", [triton_mover_that_fails, lambda gpu, torch_mode: TorchPageMover(gpu)], ids=["triton", "torch"]
)
def test_a_copy_that_raises_half_way_leaves_nothing_to_run(of: NewMover) -> None:
    """Its pages and its slot have other owners as soon as it has raised."""
    gpu = FakeGpu()
    with torch.inference_mode(), FakeTorch(gpu) as torch_mode:
        pages_RPN = torch.zeros((2, 4, 32), dtype=torch.uint8, device=DEVICE)
        slot = torch.zeros((2, 2, 32), dtype=torch.uint8)
        mover = of(gpu, torch_mode)
        for copy in (mover.gather, mover.scatter):
            gpu.num_allocations_left = 1
            with pytest.raises(torch.OutOfMemoryError):
                copy(pages_RPN, range(2), [1, 3], slot, seed=7)
            assert not gpu.queued
    gpu.close()
