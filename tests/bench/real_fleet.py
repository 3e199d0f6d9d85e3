"""Fleets of this machine with its real kernels, and what their forwards cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.measure.forwards import MeasureLimits
from planner.measure.phases import measure_engine
from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores, own_cores, split_cores
from tests.bench.models import random_model
from tests.bench.timed_node import router_flags
from tests.processes import Router

FIT_S = 20.0
FIT_TOKENS = 1100
"""Of the longest context that is measured for a fit."""


@dataclass(frozen=True, kw_only=True)
class RealNodes:
    """A model on cores of this machine, which the nodes share equally."""

    model: str
    """`builtin`, or the shape of a random model."""
    vocab_size: int
    kv_bytes_per_token: int
    max_batch: int
    """Of the decode steps that are measured."""
    context_length: int = 2048
    pool_tokens: int = 32_768
    page_size: int = 16
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    half_is_free: bool = False
    """Whether the router and the client have half of the cores for themselves. Else they share those of the nodes."""

    @property
    def name(self) -> str:
        """builtin, half of the cores free."""
        return f"{self.model}, half of the cores free" if self.half_is_free else self.model

    @property
    def cores(self) -> CpuCores:
        """Of all nodes together."""
        return split_cores(own_cores(), 2)[0] if self.half_is_free else own_cores()

    @property
    def folder(self) -> str:
        """For --model."""
        return self.model if self.model == "builtin" else str(random_model(self.model))

    def forward(self, num_nodes: int) -> CostModel:
        """The cost of a forward on one of so many nodes, measured here and now."""
        config = NodeConfig(
            model=ModelOptions(model=self.folder, cpu_cores=split_cores(self.cores, num_nodes)[0]),
            cache=CacheOptions(page_size=self.page_size, max_total_tokens=self.pool_tokens),
            schedule=ScheduleOptions(
                chunked_prefill_size=self.chunked_prefill_size, max_running_requests=self.max_running_requests
            ),
        )
        effort = MeasureLimits(engine_s=FIT_S, max_batch=self.max_batch, max_tokens=FIT_TOKENS)
        measured, _, _ = measure_engine(config, effort)
        return measured.forward


BUILTIN = RealNodes(
    model="builtin",
    vocab_size=4096,
    kv_bytes_per_token=4096,
    max_batch=16,
)
LLAMA = RealNodes(
    model="llama-160m",
    vocab_size=32_000,
    kv_bytes_per_token=36_864,
    max_batch=8,
)


@contextmanager
def real_fleet(nodes: RealNodes, candidate: Candidate, folder: Path) -> Iterator[Router]:
    """`router --local` with the nodes of `candidate`, ready to serve."""
    flags = [
        *("--local", f"{candidate.num_prefill}P{candidate.num_decode}D", "--model", nodes.folder),
        *("--cpu-cores", str(nodes.cores)),
        *(
            "--max-total-tokens",
            str(nodes.pool_tokens),
            "--chunked-prefill-size",
            str(nodes.chunked_prefill_size),
        ),
        *(["--enable-mixed-chunk"] if candidate.enable_mixed_chunk else []),
        *router_flags(candidate),
    ]
    with Router(folder, *flags) as router:
        router.wait_ready()
        yield router
        router.stop()
