"""Streams that are moved from one decode node to the other and back: a part of the bench `failover`.

Both tables empty a decode node by `DELETE /fleet/nodes/ID`, and add it again afterwards:

    moved stream   the longest wait for a token between the DELETE and its answer, over the median wait of the same
                   stream in the 0.5 s before; `quiet`: the same of a time as long in which nothing happens
    drain          the time of the DELETE, and the bytes that moved meanwhile, against the transfer bench: the whole
                   path of pages between two processes that do nothing else
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from shared.config import TransferOptions
from tests.bench.models import VOCAB_SIZE
from tests.bench.running_streams import RunningStreams
from tests.bench.servers import prompt_ids
from tests.bench.stats import percentile, significant
from tests.bench.transfer import PAGE_NBYTES, DecodeSide, Setting
from tests.patience import PATIENCE_S
from tests.processes import Fleet, Node

CONTEXTS = (300, 1000)
NUM_STREAMS, NUM_MOVES = 4, 8
"""Of each context, so many streams move so often."""
BEFORE_S = 0.5
DRAINED_STREAMS, DRAINED_CONTEXT, DRAINED_OUTPUT = 32, 1000, 128
TRANSFER_ROUNDS, TRANSFER_MIB = 5, 256


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The longest waits for a token of one stream: while it moved, and while nothing happened. Seconds."""

    moving_s: float
    quiet_s: float
    step_s: float


def rows(fleet: Fleet, rng: random.Random) -> Iterator[dict[str, Any]]:
    """The rows of both tables."""
    for context in CONTEXTS:
        yield moved_row(context, asyncio.run(_move_to_and_fro(fleet, rng, context)))
    yield asyncio.run(_drain_many(fleet, rng))


def moved_row(context: int, pauses: Sequence[Pause]) -> dict[str, Any]:
    """Pauses in steps of the same stream."""
    moving = sorted(pause.moving_s / pause.step_s for pause in pauses)
    quiet = sorted(pause.quiet_s / pause.step_s for pause in pauses)
    return {
        "bench": "moved_stream",
        "context": context,
        "moves": len(pauses),
        "step_ms": significant(1e3 * statistics.median(pause.step_s for pause in pauses)),
        "pause_p50_ms": significant(1e3 * statistics.median(pause.moving_s for pause in pauses)),
        "pause_steps_p50": significant(percentile(moving, 50)),
        "pause_steps_p99": significant(percentile(moving, 99)),
        "quiet_steps_p50": significant(percentile(quiet, 50)),
        "quiet_steps_p99": significant(percentile(quiet, 99)),
    }


async def _move_to_and_fro(fleet: Fleet, rng: random.Random, context: int) -> list[Pause]:
    nodes = [fleet.nodes["d0"], fleet.nodes["d1"]]
    pauses: list[Pause] = []
    async with RunningStreams(fleet.router.url) as streams, httpx.AsyncClient(timeout=PATIENCE_S) as admin:
        await _remove(admin, fleet, nodes[1])
        prompts = [prompt_ids(rng, context, VOCAB_SIZE) for _ in range(NUM_STREAMS)]
        streams.start(prompts, 3000)
        await streams.have_tokens(1)
        await _add(admin, fleet, nodes[1])
        for number in range(NUM_MOVES):
            source = nodes[number % 2]
            quiet = time.perf_counter()
            await asyncio.sleep(BEFORE_S)
            begin = time.perf_counter()
            assert await _remove(admin, fleet, source) == 0, "a stream was not moved, but failed over"
            end = time.perf_counter()
            await streams.have_tokens(2, since=end)
            pauses += [
                Pause(
                    moving_s=streams.longest_gap_s(rid, begin, end),
                    quiet_s=streams.longest_gap_s(rid, max(quiet, 2 * begin - end), begin),
                    step_s=streams.median_gap_s(rid, quiet, begin),
                )
                for rid in streams.seen
            ]
            await _add(admin, fleet, source)
    return pauses


async def _drain_many(fleet: Fleet, rng: random.Random) -> dict[str, Any]:
    """Empty d0 while it has all streams. The same prompts have run there before, undisturbed."""
    d0, d1 = fleet.nodes["d0"], fleet.nodes["d1"]
    prompts = [prompt_ids(rng, DRAINED_CONTEXT, VOCAB_SIZE) for _ in range(DRAINED_STREAMS)]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as admin:
        await _remove(admin, fleet, d1)
        async with RunningStreams(fleet.router.url) as streams:
            streams.start(prompts, DRAINED_OUTPUT)
            expected = list((await streams.end()).values())
        async with RunningStreams(fleet.router.url) as streams:
            streams.start(prompts, DRAINED_OUTPUT)
            await streams.have_tokens(1)
            await _add(admin, fleet, d1)
            nbytes = await _kv_bytes_of(admin, fleet, d1)
            begin = time.perf_counter()
            num_running = sum(
                seen.meta["completion_tokens"] < DRAINED_OUTPUT for seen in streams.seen.values()
            )
            num_failed_over = await _remove(admin, fleet, d0)
            drain_s = time.perf_counter() - begin
            nbytes = await _kv_bytes_of(admin, fleet, d1) - nbytes
            outputs = list((await streams.end()).values())
            longest = sorted(streams.longest_gap_s(rid, begin, begin + drain_s) for rid in streams.seen)
        await _add(admin, fleet, d0)
    transfer_gb_s = _transfer_gb_s()
    return {
        "bench": "drain",
        "streams": num_running,
        "context": DRAINED_CONTEXT,
        "drain_s": significant(drain_s),
        "moved_mib": nbytes >> 20,
        "gb_s": significant(nbytes / drain_s / 1e9),
        "transfer_gb_s": significant(transfer_gb_s),
        "ratio": significant(drain_s * transfer_gb_s * 1e9 / nbytes),
        "longest_pause_p50_ms": significant(1e3 * percentile(longest, 50)),
        "longest_pause_p99_ms": significant(1e3 * percentile(longest, 99)),
        "failed_over": num_failed_over,
        "wrong": sum(one != other for one, other in zip(outputs, expected, strict=True)),
    }


async def _remove(admin: httpx.AsyncClient, fleet: Fleet, node: Node) -> int:
    """Drain and remove a node; how many streams had to fail over for it."""
    answer = await admin.delete(f"{fleet.router.url}/fleet/nodes/{node.name}")
    assert answer.status_code == 200, answer.text
    num_failed_over: int = answer.json()["num_failed_over"]
    return num_failed_over


async def _add(admin: httpx.AsyncClient, fleet: Fleet, node: Node) -> None:
    body = {"role": node.role, "address": node.address}
    answer = await admin.post(f"{fleet.router.url}/fleet/nodes", json=body)
    assert answer.status_code == 200, answer.text


async def _kv_bytes_of(admin: httpx.AsyncClient, fleet: Fleet, node: Node) -> int:
    """KV bytes that a node has sent and received."""
    nodes = (await admin.get(f"{fleet.router.url}/fleet")).json()["nodes"]
    nbytes: int = next(n["load"]["kv_bytes_transferred"] for n in nodes if n["node_id"] == node.name)
    return nbytes


def _transfer_gb_s() -> float:
    """The whole path of pages over shared memory, as the transfer bench measures it."""
    side = DecodeSide(Setting(options=TransferOptions(backend="shm")))
    num_pages = (TRANSFER_MIB << 20) // PAGE_NBYTES
    seconds = [side.batch_s(num_pages) for _ in range(TRANSFER_ROUNDS)]
    side.close()
    return (TRANSFER_MIB << 20) / statistics.median(seconds) / 1e9
