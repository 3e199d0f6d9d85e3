"""Which forwards are measured, and how: every point once a pass, so that a slow moment meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.measure.fitting import DecodePoint, ExtendPoint, Forwards, HostPoint
from planner.measure.node_loop import Forward, NodeLoop
from shared.protocol.messages import NodeLimits
from shared.timeline import Clock

OnProgress = Callable[[str, float], None]
"""(what is measured, fraction of its time that is over)"""
Spans = tuple[tuple[int, int], ...]
SHORTEST = 16
"""Tokens of the shortest prompt and context."""
STEPS = 8
"""Decode steps of one round of a point."""
ROOM_STEPS = STEPS + 16
"""Tokens that each request of a decode point needs beyond its context."""
MAX_BATCH = 256
"""Of decode points: no fit needs more, and each request takes time to set up."""
NUM_CONTEXTS = 4


@dataclass(frozen=True, kw_only=True)
class MeasureLimits:
    """How long to measure, and what. The defaults come to about two minutes with the built-in model."""

    engine_s: float = 50.0
    """Passes over all forwards end then, once there are MIN_PASSES beside the first, which warms up."""
    max_passes: int = 24
    max_batch: int = MAX_BATCH
    max_tokens: int = 1 << 40
    """Of a context."""
    transfer_s: float = 8.0
    starts: int = 2
    """Of a node's process."""
    load_s: float = 6.0
    """What each load of a router is to take at most."""


MIN_PASSES = 2


@dataclass(frozen=True)
class Extend:
    """Prompts that are computed in one forward, (start, length) each."""

    spans: Spans

    @property
    def name(self) -> str:
        """prefill 4x128, prefill 512 after 1024."""
        start, length = self.spans[0]
        times = f"{len(self.spans)}x" if len(self.spans) > 1 else ""
        return f"prefill {times}{length}" + (f" after {start}" if start else "")

    def run(self, loop: NodeLoop) -> list[Forward]:
        """One round."""
        return loop.prefill(self.spans)


@dataclass(frozen=True)
class DecodeStep:
    """A step of `batch` requests over `context` tokens each."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """decode 8x1536."""
        return f"decode {self.batch}x{self.context}"

    def run(self, loop: NodeLoop) -> list[Forward]:
        """One round."""
        return loop.decode(self.batch, self.context, STEPS)


def points_of(
    limits: NodeLimits, chunk: int, page_size: int, *, has_cache: bool, effort: MeasureLimits
) -> list[Extend | DecodeStep]:
    """What a node with these limits is measured at.

    Prompts of up to a chunk, several of them at once, and where a RadixCache can stand for their beginning, chunks
    deep in long prompts; decode steps.
    """
    room = min(limits.context_length, limits.max_total_num_tokens, effort.max_tokens) - ROOM_STEPS
    chunk = min(chunk, room)
    spans: list[Spans] = [((0, length),) for length in powers_of_two(SHORTEST, chunk)]
    spans += [((0, length),) * (chunk // length) for length in (chunk // 2, chunk // 8) if length >= SHORTEST]
    if has_cache and room >= 2 * chunk + page_size:
        starts = [(room * n // 4 - chunk) // page_size * page_size for n in (2, 3, 4)]
        spans += [((start, chunk),) for start in starts if start > 0]
        spans += [((starts[-1], SHORTEST),)]
    steps = [
        DecodeStep(batch, context)
        for batch in powers_of_two(1, min(limits.max_running_requests, effort.max_batch))
        for context in geometric(SHORTEST, room, NUM_CONTEXTS)
        if batch * (context + ROOM_STEPS) <= limits.max_total_num_tokens
    ]
    return [*map(Extend, dict.fromkeys(spans)), *steps]


def powers_of_two(least: int, most: int) -> list[int]:
    """least, 2 least, 4 least .. most."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


def geometric(least: int, most: int, number: int) -> list[int]:
    """`number` whole numbers from least to most, each as many times the one before."""
    ratio = (most / least) ** (1 / (number - 1))
    return sorted({round(least * ratio**i) for i in range(number - 1)} | {most})


def measure_forwards(
    loop: NodeLoop,
    points: Sequence[Extend | DecodeStep],
    effort: MeasureLimits,
    *,
    on_progress: OnProgress = lambda what, fraction: None,
    clock: Clock = time.monotonic,
) -> Forwards:
    """Pass after pass over all points until the time is up. The first pass is dropped: it finds every cache cold."""
    rounds: defaultdict[tuple[Spans, int, int], list[float]] = defaultdict(list)
    names: dict[tuple[Spans, int, int], str] = {}
    hosts: defaultdict[int, list[float]] = defaultdict(list)
    begin, num_passes = clock(), effort.max_passes + 1
    for number in range(num_passes):
        if number > MIN_PASSES and clock() - begin > effort.engine_s:
            break
        for index, point in enumerate(points):
            done = max((clock() - begin) / effort.engine_s, (number + index / len(points)) / num_passes)
            on_progress(point.name, min(done, 1.0))
            forwards = point.run(loop)
            if not number or not forwards:
                continue
            one = forwards[len(forwards) // 2]  # the KV of a decode step grows with each, so this is the mean
            key = one.extends, one.batch, one.kv_tokens
            names[key] = point.name
            rounds[key].append(statistics.median(forward.seconds for forward in forwards))
            hosts[len(one.extends) + one.batch].append(statistics.median(f.host_s for f in forwards))
    return Forwards(
        extends=tuple(
            ExtendPoint(what=names[key], seconds=tuple(seconds), spans=key[0])
            for key, seconds in rounds.items()
            if key[0]
        ),
        decodes=tuple(
            DecodePoint(what=names[key], seconds=tuple(seconds), batch=key[1], kv_tokens=key[2])
            for key, seconds in rounds.items()
            if not key[0]
        ),
        hosts=tuple(
            HostPoint(what=f"scheduler {number}", seconds=tuple(seconds), num_requests=number)
            for number, seconds in hosts.items()
        ),
    )
