"""Fleets of this machine with its real kernels, and what their forwards cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.candidate import Candidate
from planner.cost_model import CostModel
from shared.cpu_cores import own_cores, split_cores
from tests.bench.fit_cost_model import Bench, fit, median_of
from tests.bench.models import random_model
from tests.bench.timed_node import router_flags
from tests.processes import Router


@dataclass(frozen=True, kw_only=True)
class RealNodes:
    """A model on the cores of this machine, which the nodes share equally."""

    model: str
    """`builtin`, or the shape of a random model."""
    vocab_size: int
    kv_bytes_per_token: int
    prompt_lengths: tuple[int, ...]
    decode_batches: tuple[int, ...]
    decode_kv_lengths: tuple[int, ...]
    """What is measured for the fit."""
    context_length: int = 2048
    pool_tokens: int = 32_768
    page_size: int = 16
    chunked_prefill_size: int = 512
    max_running_requests: int = 64

    @property
    def folder(self) -> str:
        """For --model."""
        return self.model if self.model == "builtin" else str(random_model(self.model))

    def forward(self, num_nodes: int) -> CostModel:
        """The cost of a forward on one of so many nodes, measured here and now."""
        bench = Bench(self.folder, split_cores(own_cores(), num_nodes)[0])
        bench.prefill_s(self.prompt_lengths[-1])
        prefill = {n: median_of(lambda n=n: bench.prefill_s(n)) for n in self.prompt_lengths}  # type: ignore[misc]
        decode = {
            (batch, kv_len): median_of(lambda batch=batch, kv_len=kv_len: bench.decode_s(batch, kv_len))  # type: ignore[misc]
            for batch in self.decode_batches
            for kv_len in self.decode_kv_lengths
        }
        bench.engine.stream.close()
        a, b, c = fit([(1, n, n * n) for n in prefill], list(prefill.values()))
        d, e, f = fit([(1, batch, batch * kv_len) for batch, kv_len in decode], list(decode.values()))
        return CostModel(a=a, b=b, c=c, d=d, e=e, f=f)


BUILTIN = RealNodes(
    model="builtin",
    vocab_size=4096,
    kv_bytes_per_token=4096,
    prompt_lengths=(16, 64, 128, 256, 512),
    decode_batches=(1, 2, 4, 8, 16),
    decode_kv_lengths=(64, 512),
)
LLAMA = RealNodes(
    model="llama-160m",
    vocab_size=32_000,
    kv_bytes_per_token=36_864,
    prompt_lengths=(16, 64, 256, 512),
    decode_batches=(1, 4, 8),
    decode_kv_lengths=(64, 512),
)


@contextmanager
def real_fleet(nodes: RealNodes, candidate: Candidate, folder: Path) -> Iterator[Router]:
    """`router --local` with the nodes of `candidate`, ready to serve."""
    flags = [
        *("--local", f"{candidate.num_prefill}P{candidate.num_decode}D", "--model", nodes.folder),
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
