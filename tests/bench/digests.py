"""What do digests of KV pages cost? Each round runs with them and without, in turn.

copies     CPU time of one thread for the gather and the scatter of a chunk of 4 MiB, without the path around them
transfer   the whole path between two processes, batches of 256 MiB
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shared.config import TransferOptions
from shared.kvcache.page_mover import NumpyPageMover, PageMover
from tests.bench.stats import figure, ratios
from tests.bench.table import Row
from tests.bench.transfer import NUM_LAYERS, NUM_PAGES, PAGE_NBYTES, DecodeSide, Setting, behave_like_a_node

ROUNDS = 25
CHUNK_NBYTES = 4 << 20
CHUNKS = 64
BATCH_MIB = 256


def main() -> Iterator[dict[str, Any]]:
    """The copies by what copies, then the path by what carries the pages."""
    behave_like_a_node()
    pool = Setting(options=TransferOptions()).make_pool()
    pool.buffer_LSNHPD.normal_()
    for mover in (pool.mover, NumpyPageMover()):
        pool.mover = mover
        for copy in ("gather", "scatter"):
            yield measure_copies(mover, copy, getattr(pool, copy))
    for backend in ("shm", "gloo"):
        yield measure_path(backend)


def measure_copies(mover: PageMover, name: str, copy: Any) -> dict[str, Any]:
    """CPU time of chunks, since others use the machine as well. Slots are reused, as on a link."""
    slots = [torch.zeros(CHUNK_NBYTES, dtype=torch.uint8) for _ in range(2)]
    pages_per_chunk = CHUNK_NBYTES // PAGE_NBYTES

    def gb_s(seed: int | None) -> float:
        start = time.thread_time()
        for i in range(CHUNKS):
            pages = random.sample(range(1, NUM_PAGES + 1), pages_per_chunk)
            copy(pages, 0, NUM_LAYERS, slots[i % 2], seed)
        return CHUNKS * CHUNK_NBYTES / (time.thread_time() - start) / 1e9

    gb_s(1)
    rounds = [(gb_s(1), gb_s(None)) for _ in range(ROUNDS)]
    return row(f"{mover.name} {name}", *zip(*rounds, strict=True))


def measure_path(backend: str) -> dict[str, Any]:
    """Two pairs of processes, of which one moves pages at a time."""
    options = TransferOptions(backend=backend)
    sides = [DecodeSide(Setting(options=options, digested=digested)) for digested in (True, False)]
    rounds = []
    for number in range(ROUNDS + 1):
        seconds = [sum(side.batch_s((BATCH_MIB << 20) // PAGE_NBYTES) for _ in range(2)) for side in sides]
        if number:  # the first is for warming up
            rounds.append([2 * (BATCH_MIB << 20) / each / 1e9 for each in seconds])
    for side in sides:
        side.close()
    return row(f"transfer {backend}", *zip(*rounds, strict=True))


def row(what: str, digested: Sequence[float], undigested: Sequence[float]) -> dict[str, Any]:
    """`time_ratio`: how much longer it takes with digests, of each round."""
    return {
        "bench": "digests",
        "what": what,
        **figure("gb_s", digested),
        **figure("undigested_gb_s", undigested),
        **figure("time_ratio", ratios(undigested, digested)),
        "rounds": len(digested),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How much longer each takes with digests."""
    return {row["what"].replace(" ", "_"): row["time_ratio"] for row in rows}
