"""How near are the attention kernels to what the machine allows, and how far from plain torch?

One layer's attention over paged KV, on one core, by calls of the native kernel and of its slow twin in
shared/kernels/reference.py. The pages of each call are others than those of the last, and more than the caches hold.

    decode  one new token of each sequence: it reads K and V once, so its limit is a streaming read in the same run
    extend  the tokens of one prompt over those cached before it: `ratio` is its rate over that of oneDNN's GEMMs of
            the same shapes, q k^T and p v, of which it computes the causal half

`speedup` is the twin's time over the native kernel's.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shared.host_memory import new_host_buffer
from shared.kernels import reference
from shared.kernels.cpu.build import NativeUnavailable
from shared.kernels.cpu.library import Team, load_library
from tests.bench.forwards import fill_randomly
from tests.bench.limits import Gemms, StreamingRead, uncached_nbytes
from tests.bench.machine import pinned, usable_cores
from tests.bench.rounds import in_turn
from tests.bench.stats import figure, ratios
from tests.bench.table import Row
from tests.kernels.cpu import attention as native

PAGE_SIZE = 16
DECODE_CASES = ((1, 4096), (8, 512), (8, 2048), (32, 512), (32, 2048))
"""(sequences, tokens of each). With fewer tokens the Python around a call would be what is measured."""
EXTEND_CASES = ((0, 512), (0, 2048), (1536, 512))
"""(cached, computed) tokens."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of one layer."""

    num: int
    num_kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.num}/{self.num_kv} of {self.dim}"


HEADS = (
    Heads(num=12, num_kv=12, dim=64),
    Heads(num=16, num_kv=8, dim=128),
    Heads(num=32, num_kv=8, dim=64),
)


class Pages:
    """K and V of one layer, random, in more pages than the caches hold, and calls that each take the next ones."""

    def __init__(self, heads: Heads, most_tokens: int) -> None:
        page_nbytes = 2 * PAGE_SIZE * heads.num_kv * heads.dim
        least = uncached_nbytes() // (2 * page_nbytes)
        num_pages = max(least, most_tokens // PAGE_SIZE)
        shape = (num_pages, heads.num_kv, PAGE_SIZE, heads.dim)
        self.k_NKSD, self.v_NKSD = (  # in huge pages, as a node's pool is
            new_host_buffer(2 * math.prod(shape)).view(torch.bfloat16).view(shape) for _ in range(2)
        )
        for pages in (self.k_NKSD, self.v_NKSD):
            fill_randomly(pages)
        self._order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()

    def tables(self, num: int, num_tokens: int) -> list[torch.Tensor]:
        """Page tables [num, P] for calls one after the other, no page in two of them."""
        num_pages = num_tokens // PAGE_SIZE
        num_calls = len(self._order) // (num * num_pages)
        return [
            table.reshape(num, num_pages)
            for table in self._order[: num_calls * num * num_pages].split(num * num_pages)
        ]


def main() -> Iterator[dict[str, Any]]:
    """Decode, then extend, for each kind of heads."""
    core = usable_cores()[0]
    torch.set_num_threads(1)
    with pinned([core]), _team(core) as team:
        read = StreamingRead([core])
        for heads in HEADS:
            pages = Pages(heads, max(batch * context for batch, context in DECODE_CASES))
            for batch, context in DECODE_CASES:
                yield _decode(team, read, heads, pages, batch, context)
        for heads in HEADS:
            pages = Pages(heads, max(sum(case) for case in EXTEND_CASES))
            for cached, length in EXTEND_CASES:
                yield _extend(team, heads, pages, cached, length)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The least ratio of each kind of call, and what the native kernels gain."""
    figures: dict[str, Any] = {}
    for call in ("decode", "extend"):
        of_call = [row for row in rows if row["bench"] == f"attention_{call}"]
        figures[f"{call}_least_ratio"] = min(row["ratio"] for row in of_call)
        figures[f"{call}_most_ratio"] = max(row["ratio"] for row in of_call)
        figures[f"{call}_speedup"] = [
            min(row["speedup"] for row in of_call),
            max(row["speedup"] for row in of_call),
        ]
    return {"kernels": rows[0]["kernels"], **figures}


def _decode(
    team: Team | None, read: StreamingRead, heads: Heads, pages: Pages, batch: int, context: int
) -> dict[str, Any]:
    q_BHD = torch.randn(batch, heads.num, heads.dim).bfloat16()
    tables, seq_lens = pages.tables(batch, context), [context] * batch
    lens_B = torch.tensor(seq_lens)

    def by_native(table: torch.Tensor) -> None:
        assert team is not None
        native.decode_attention(team, q_BHD, pages.k_NKSD, pages.v_NKSD, table, seq_lens)

    def by_torch(table: torch.Tensor) -> None:
        reference.decode_attention(q_BHD, pages.k_NKSD, pages.v_NKSD, table.long(), lens_B)

    # Not in turn with the twin: Linux clears up what that freed at the cost of whoever runs next, 9 ms of a call.
    call_s, gb_s = in_turn([_calls(by_native if team else by_torch, tables, 16), read.gb_s])
    (torch_s,) = in_turn([_calls(by_torch, tables, 2)])
    return {
        "bench": "attention_decode",
        "kernels": "native" if team else "torch",
        "heads": str(heads),
        "batch": batch,
        "context": context,
        **decode_figures(heads, batch * context, gb_s, torch_s, call_s),
    }


def _extend(team: Team | None, heads: Heads, pages: Pages, cached: int, length: int) -> dict[str, Any]:
    end = cached + length
    q_THD = torch.randn(length, heads.num, heads.dim).bfloat16()
    tables = pages.tables(1, end)

    def by_native(table: torch.Tensor) -> None:
        assert team is not None
        native.extend_attention(team, q_THD, pages.k_NKSD, pages.v_NKSD, table, [cached], [length])

    def by_torch(table: torch.Tensor) -> None:
        reference.extend_attention(q_THD, pages.k_NKSD, pages.v_NKSD, table.long(), [cached], [length])

    gemms = Gemms(length, [(end, heads.dim), (heads.dim, end)])
    gflop_s, torch_s, call_s = in_turn(
        [gemms.gflop_s, _calls(by_torch, tables, 1), _calls(by_native if team else by_torch, tables, 2)]
    )
    return {
        "bench": "attention_extend",
        "kernels": "native" if team else "torch",
        "heads": str(heads),
        "cached": cached,
        "length": length,
        **extend_figures(heads, cached, length, gflop_s, torch_s, call_s),
    }


def decode_figures(
    heads: Heads, num_tokens: int, gb_s: Sequence[float], torch_s: Sequence[float], call_s: Sequence[float]
) -> dict[str, Any]:
    """What rounds of read rate and kernel over `num_tokens` of K and V come to, and those of the twin."""
    achieved = [2 * 2 * heads.num_kv * heads.dim * num_tokens / 1e9 / s for s in call_s]
    return {
        **figure("call_us", [1e6 * s for s in call_s]),
        **figure("gb_s", achieved),
        **figure("read_gb_s", gb_s),
        **figure("ratio", ratios(achieved, gb_s)),
        **figure("torch_us", [1e6 * s for s in torch_s]),
        **figure("speedup", [statistics.median(torch_s) / s for s in call_s]),
    }


def extend_figures(
    heads: Heads,
    cached: int,
    length: int,
    gflop_s: Sequence[float],
    torch_s: Sequence[float],
    call_s: Sequence[float],
) -> dict[str, Any]:
    """What rounds of (GEMM rate, twin, kernel) come to."""
    gflop = 4 * heads.num * heads.dim * (length * cached + length * (length + 1) // 2) / 1e9
    achieved = [gflop / s for s in call_s]
    return {
        **figure("call_ms", [1e3 * s for s in call_s]),
        **figure("gflop_s", achieved),
        **figure("gemm_gflop_s", gflop_s),
        **figure("ratio", ratios(achieved, gflop_s)),
        **figure("torch_ms", [1e3 * s for s in torch_s]),
        **figure("speedup", ratios(torch_s, call_s)),
    }


def _calls(
    call: Callable[[torch.Tensor], None], tables: Sequence[torch.Tensor], num: int
) -> Callable[[], float]:
    """Seconds of one call, from `num` of them with a table each; the next measurement goes on with the next table."""
    turns, at_once = itertools.cycle(tables), min(len(tables), num)

    @torch.inference_mode()
    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(at_once):
            call(next(turns))
        return (time.perf_counter() - start) / at_once

    return seconds


@contextmanager
def _team(core: int) -> Iterator[Team | None]:
    """The native kernels' team, or None where there are no native kernels."""
    try:
        library = load_library()
    except NativeUnavailable:
        yield None
        return
    team = Team(library, [core])
    try:
        yield team
    finally:
        team.close()
