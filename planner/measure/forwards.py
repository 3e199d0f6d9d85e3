"""Which forwards are measured, and how: every one once a pass, so that a slow moment meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.cost_model import CostModel
from planner.measure.fitting import Point, fit, fit_extends
from planner.measure.node_loop import Forward, NodeLoop
from planner.profile import Residual
from shared.protocol.messages import NodeLimits

OnProgress = Callable[[str], None]
"""(what is measured)"""
Spans = tuple[tuple[int, int], ...]
_Rounds = defaultdict[tuple[str, tuple[float, ...]], list[float]]
"""Seconds by what was measured and its row."""
SHORTEST = 16
"""Tokens of the shortest prompt and context."""
STEPS = 8
"""Decode steps of one round."""
ROOM_STEPS = STEPS + 16
"""Tokens that each request of a decode step needs beyond its context."""
MAX_BATCH = 256
"""Of decode steps: no fit needs more, and each request takes time to set up."""
NUM_CONTEXTS = 4
MIN_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class MeasureLimits:
    """How long to measure, and what. The defaults come to about a minute with the built-in model."""

    engine_s: float = 50.0
    """Passes over all forwards end then, once there are MIN_PASSES beside the first, which warms up."""
    max_passes: int = 24
    max_batch: int = MAX_BATCH
    max_tokens: int = 1 << 40
    """Of a context."""
    transfer_s: float = 8.0


@dataclass(frozen=True)
class Task:
    """A forward to measure: prompts, (start, length) each, or else a decode step over so much context each."""

    spans: Spans = ()
    batch: int = 0
    context: int = 0

    @property
    def name(self) -> str:
        """prefill 4x128, prefill 512 after 1024, decode 8x1536."""
        if not self.spans:
            return f"decode {self.batch}x{self.context}"
        start, length = self.spans[0]
        times = f"{len(self.spans)}x" if len(self.spans) > 1 else ""
        return f"prefill {times}{length}" + (f" after {start}" if start else "")

    def run(self, loop: NodeLoop) -> list[Forward]:
        """One round."""
        return loop.prefill(self.spans) if self.spans else loop.decode(self.batch, self.context, STEPS)


def tasks_of(
    limits: NodeLimits, chunk: int, page_size: int, *, has_cache: bool, effort: MeasureLimits
) -> list[Task]:
    """What a node with these limits is measured at.

    Prompts of up to a chunk, several of them at once, and where a RadixCache can stand for their beginning, chunks
    deep in long prompts; decode steps.
    """
    room = min(limits.context_length, limits.max_total_num_tokens, effort.max_tokens) - ROOM_STEPS
    chunk = min(chunk, room)
    spans: list[Spans] = [((0, length),) for length in _powers_of_two(SHORTEST, chunk)]
    spans += [((0, length),) * (chunk // length) for length in (chunk // 2, chunk // 8) if length >= SHORTEST]
    if has_cache and room >= 2 * chunk + page_size:
        starts = [(room * n // 4 - chunk) // page_size * page_size for n in (2, 3, 4)]
        spans += [((start, chunk),) for start in starts if start > 0]
        spans += [((starts[-1], SHORTEST),)]
    ratio = (room / SHORTEST) ** (1 / (NUM_CONTEXTS - 1))
    contexts = sorted({round(SHORTEST * ratio**i) for i in range(NUM_CONTEXTS - 1)} | {room})
    steps = [
        Task(batch=batch, context=context)
        for batch in _powers_of_two(1, min(limits.max_running_requests, effort.max_batch))
        for context in contexts
        if batch * (context + ROOM_STEPS) <= limits.max_total_num_tokens
    ]
    return [*map(Task, dict.fromkeys(spans)), *steps]


def _powers_of_two(least: int, most: int) -> list[int]:
    """least, 2 least, 4 least .. most."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """All that was measured on the engine."""

    extends: tuple[Point, ...]
    decodes: tuple[Point, ...]
    hosts: tuple[Point, ...]
    """The scheduler's own work for a forward of so many requests."""

    def fit(self) -> tuple[CostModel, tuple[Residual, ...]]:
        """The coefficients, and every point against them."""
        *abc, floor_s = fit_extends(self.extends)
        decode, host = fit(self.decodes), fit(self.hosts)
        names = ("a", "b", "c", "d", "e", "f", "step_s", "step_request_s")
        costs = CostModel(floor_s=floor_s, **dict(zip(names, (*abc, *decode, *host), strict=True)))
        return costs, (
            *(point.residual(abc, floor_s) for point in self.extends),
            *(point.residual(decode) for point in self.decodes),
            *(point.residual(host) for point in self.hosts),
        )


def extend_row(spans: Spans) -> tuple[float, ...]:
    """What a, b and c are multiplied with."""
    tokens = sum(length for _, length in spans)
    return 1, tokens, sum((start + length) ** 2 - start**2 for start, length in spans)


def measure_forwards(
    loop: NodeLoop, tasks: Sequence[Task], effort: MeasureLimits, on_progress: OnProgress
) -> Forwards:
    """Pass after pass over all tasks until the time is up. The first pass is dropped: it finds every cache cold."""
    extends: _Rounds = defaultdict(list)
    decodes: _Rounds = defaultdict(list)
    hosts: _Rounds = defaultdict(list)
    begin = time.monotonic()
    for number in range(effort.max_passes + 1):
        if number > MIN_PASSES and time.monotonic() - begin > effort.engine_s:
            break
        for task in tasks:
            on_progress(f"{task.name}, pass {number + 1}")
            forwards = task.run(loop)
            if not number or not forwards:
                continue
            one = forwards[len(forwards) // 2]  # the KV of a decode step grows with each, so this is the mean
            seconds = statistics.median(forward.seconds for forward in forwards)
            if one.extends:
                extends[task.name, extend_row(one.extends)].append(seconds)
            else:
                decodes[task.name, (1, one.batch, one.kv_tokens)].append(seconds)
            num = len(one.extends) + one.batch
            hosts[f"scheduler {num}", (1, num)].append(statistics.median(f.host_s for f in forwards))
    return Forwards(extends=_points(extends), decodes=_points(decodes), hosts=_points(hosts))


def _points(rounds: _Rounds) -> tuple[Point, ...]:
    return tuple(Point(what=what, row=row, seconds=tuple(each)) for (what, row), each in rounds.items())
