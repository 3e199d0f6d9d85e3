"""What does a client see of a node that dies, and of a stream that moves?

A prefill node and two decode nodes, started by hand, which are killed, stopped and drained; a model with as much KV a
token as Llama 3.2 1B, and few weights. Four tables, all of one run:

    detection      from kill -9, or SIGSTOP, until the router's log says that the node is lost
    killed stream  the longest pause of a stream whose decode node is killed, against what prefills of the same
                   lengths, sent at once, take on the nodes that are left
    moved stream   the longest pause while a stream moves, in median steps of that stream (tests/bench/moves.py)
    drain          of a decode node with many streams, against the transfer bench
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import moves
from tests.bench.models import VOCAB_SIZE, random_model
from tests.bench.running_streams import RunningStreams
from tests.bench.servers import prompt_ids
from tests.bench.stats import percentile, significant
from tests.bench.table import Row
from tests.patience import until
from tests.processes import Fleet, Node

MODEL = "llama-4-layers"
NODE_TIMEOUT_S = 3.0
DETECTED_MS = 100.0
NUM_KILLS, NUM_STOPS = 12, 3
"""Of each role."""
NUM_STREAMS = 12
"""Half of them on each decode node."""
COLD_ROUNDS, CACHED_ROUNDS = 5, 3
PROMPT_TOKENS = range(256, 512)
OUTPUT_TOKENS = 2000
SETTLED_TOKENS = 16
FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "49152")


@dataclass
class Kills:
    """What was seen of the kills of one fleet, in seconds."""

    detected: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    """By role."""
    pauses: dict[bool, list[tuple[float, float]]] = field(default_factory=lambda: {False: [], True: []})
    """The pause of a stream and the time of a prefill beside it, by whether the prefill node cached the prompts."""


def main() -> Iterator[dict[str, Any]]:
    """The rows of all tables."""
    rng, kills = random.Random(0), Kills()
    with _fleet() as fleet:
        for number in range(COLD_ROUNDS + CACHED_ROUNDS):
            asyncio.run(_kill_under_streams(fleet, rng, kills, cached=number >= COLD_ROUNDS))
        while len(kills.detected["decode"]) < NUM_KILLS:
            _kill_idle(fleet, kills)
        for role, seconds in kills.detected.items():
            yield detection_row(f"{role} node killed", seconds, DETECTED_MS / 1e3)
        stopped = [each for _ in range(NUM_STOPS) for each in _stop_both(fleet)]
        yield detection_row("node stopped", stopped, NODE_TIMEOUT_S)
        for cached, pauses in kills.pauses.items():
            yield killed_row(pauses, cached=cached)
        yield from moves.rows(fleet, rng)


def detection_row(what: str, seconds: Sequence[float], limit_s: float) -> dict[str, Any]:
    """How long the router did not know it."""
    ordered = sorted(seconds)
    return {
        "bench": "detection",
        "what": what,
        "times": len(ordered),
        "p50_ms": significant(1e3 * percentile(ordered, 50)),
        "p99_ms": significant(1e3 * percentile(ordered, 99)),
        "limit_ms": 1e3 * limit_s,
        "p99_of_limit": significant(percentile(ordered, 99) / limit_s),
    }


def killed_row(pauses: Sequence[tuple[float, float]], *, cached: bool) -> dict[str, Any]:
    """Pauses and prefills, and the pause of each stream over the prefill of its rank in the same round."""
    pause_ms, prefill_ms = (sorted(1e3 * s for s in column) for column in zip(*pauses, strict=True))
    ratios = sorted(pause / prefill for pause, prefill in pauses)
    return {
        "bench": "killed_stream",
        "prompt_cached": cached,
        "streams": len(pauses),
        "pause_p50_ms": significant(percentile(pause_ms, 50)),
        "pause_p99_ms": significant(percentile(pause_ms, 99)),
        "prefill_p50_ms": significant(percentile(prefill_ms, 50)),
        "prefill_p99_ms": significant(percentile(prefill_ms, 99)),
        "ratio_p50": significant(percentile(ratios, 50)),
        "ratio_p99": significant(percentile(ratios, 99)),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figure of each table that has an aim."""
    killed = [row for row in rows if row["bench"] == "detection" and row["what"].endswith("killed")]
    of = {
        bench: [row for row in rows if row["bench"] == bench] for bench in ("killed_stream", "moved_stream")
    }
    drain = next(row for row in rows if row["bench"] == "drain")
    return {
        "detected_p99_ms": max(row["p99_ms"] for row in killed),
        "killed_pause_over_prefill": max(row["ratio_p50"] for row in of["killed_stream"]),
        "moved_pause_steps": max(row["pause_steps_p50"] for row in of["moved_stream"]),
        "drain_s": drain["drain_s"],
        "drain_over_transfer": drain["ratio"],
    }


# ------------------------------------------------------------------------------------------------ inside
@contextmanager
def _fleet() -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        Fleet(
            Path(folder),
            random_model(MODEL),
            "1P2D",
            flags=FLAGS,
            router_flags=("--node-timeout-s", f"{NODE_TIMEOUT_S:g}"),
        ) as fleet,
    ):
        yield fleet


async def _kill_under_streams(fleet: Fleet, rng: random.Random, kills: Kills, *, cached: bool) -> None:
    """Kill a decode node in the middle of its streams, and then prefill as much on the nodes that are left.

    The prefill node caches the prompts of the streams, unless it is killed and started again before.
    """
    p0 = fleet.nodes["p0"]
    victim = fleet.nodes[rng.choice(("d0", "d1"))]
    async with RunningStreams(fleet.router.url) as streams:
        lengths = rng.sample(PROMPT_TOKENS, NUM_STREAMS)
        streams.start([prompt_ids(rng, length, VOCAB_SIZE) for length in lengths], OUTPUT_TOKENS)
        await streams.have_tokens(SETTLED_TOKENS)
        if not cached:
            await asyncio.to_thread(_kill, fleet, p0, kills)
            p0.start()
            await asyncio.to_thread(_wait_whole, fleet)
            await streams.ttfts_s(
                [prompt_ids(rng, PROMPT_TOKENS.stop, VOCAB_SIZE)]
            )  # a new process is slow at first
        known = {rid: len(seen.output_ids) + len(streams.prompts[rid]) for rid, seen in streams.seen.items()}
        log_start, at = len(fleet.router.log), time.perf_counter()
        await asyncio.to_thread(_kill, fleet, victim, kills)
        failed_over = re.findall(r" failover rid=(\S+) ", fleet.router.log[log_start:])
        assert failed_over, "no stream was on the node that was killed"
        await streams.have_tokens(SETTLED_TOKENS, since=at, rids=failed_over)
        pauses = sorted(streams.longest_gap_s(rid, at, time.perf_counter()) for rid in failed_over)
        prompts = [prompt_ids(rng, known[rid], VOCAB_SIZE) for rid in failed_over]
        prefills = sorted(await streams.ttfts_s(prompts))
    kills.pauses[cached] += zip(pauses, prefills, strict=True)
    if cached:
        _kill(fleet, p0, kills)
        p0.start()
    victim.start()
    _wait_whole(fleet)


def _kill_idle(fleet: Fleet, kills: Kills) -> None:
    victims = fleet.nodes["p0"], fleet.nodes[f"d{len(kills.detected['decode']) % 2}"]
    for victim in victims:
        _kill(fleet, victim, kills)
    for victim in victims:
        victim.start()
    _wait_whole(fleet)


def _kill(fleet: Fleet, node: Node, kills: Kills) -> None:
    """kill -9. Returns when the router knows it."""
    log_start, at = len(fleet.router.log), time.time()
    node.send(signal.SIGKILL)
    kills.detected[node.role].append(_lost_at(fleet, node, log_start) - at)
    node.wait()


def _stop_both(fleet: Fleet) -> list[float]:
    """SIGSTOP to a node of each role, until the router knows it."""
    nodes = fleet.nodes["p0"], fleet.nodes["d1"]
    log_start, at = len(fleet.router.log), time.time()
    for node in nodes:
        node.send(signal.SIGSTOP)
    seconds = [_lost_at(fleet, node, log_start) - at for node in nodes]
    for node in nodes:
        node.send(signal.SIGCONT)
    _wait_whole(fleet)
    return seconds


def _lost_at(fleet: Fleet, node: Node, log_start: int) -> float:
    """The time at which the router logged that a node is lost, to a millisecond, as `time.time`."""
    pattern = re.compile(rf"^(\d\d):(\d\d):(\d\d\.\d\d\d) .* {node.role}_node_lost node={node.name} ", re.M)
    match = until(lambda: pattern.search(fleet.router.log[log_start:]), f"{node.name} is lost")
    assert match is not None
    now = time.time()
    hours, minutes, seconds = match.groups()
    local = time.localtime(now)
    ago = (local.tm_hour - int(hours)) * 3600 + (local.tm_min - int(minutes)) * 60
    return now - now % 1 + float(seconds) - local.tm_sec - ago % 86400


def _wait_whole(fleet: Fleet) -> None:
    """Until every node is alive, and the prefill node has a link to each decode node."""

    def whole() -> bool:
        num_links = {name: load["num_links"] for name, load in fleet.router.loads().items()}
        return num_links.keys() == fleet.nodes.keys() and num_links["p0"] >= len(fleet.nodes) - 1

    until(whole, "every node is alive and linked")
