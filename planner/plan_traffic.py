"""The traffic that a plan is made for: windows of requests, from a trace or from distributions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner import answer
from planner.figures import arrival_seconds, distribution
from planner.traffic.reading import read_trace
from planner.traffic.trace import SimRequest, shared_tokens
from shared.errors import ConfigError

NUM_WINDOWS = 4
MIN_WINDOW = 50


@dataclass(frozen=True)
class Traffic:
    """Requests in windows, each of which is simulated on its own."""

    windows: tuple[tuple[SimRequest, ...], ...]
    rate: float
    """Requests a second."""
    source: str
    remarks: tuple[str, ...] = ()

    @cached_property
    def record(self) -> answer.Traffic:
        """What an answer says of it."""
        requests = [request for window in self.windows for request in window]
        prompt_tokens = sum(request.input_len for request in requests)
        return answer.Traffic(
            source=self.source,
            rate=self.rate,
            num_reqs=len(requests),
            seconds=sum(window[-1].at_s - window[0].at_s for window in self.windows),
            prompt_tokens=distribution([request.input_len for request in requests]),
            output_tokens=distribution([request.output_len for request in requests]),
            reused_share=sum(map(shared_tokens, self.windows)) / prompt_tokens,
        )

    def max_prompt_factor(self, context_length: int) -> float:
        """By what prompts may be multiplied so that the longest request still fits into the context; 1 at least."""
        requests = [request for window in self.windows for request in window]
        room = context_length - 2 * max(request.output_len for request in requests)
        return max(1.0, room / max(request.input_len for request in requests))


def traffic_of(args: Namespace) -> Traffic:
    """The traffic that the flags name. Raises ConfigError."""
    if args.trace is None:
        raise ConfigError("it needs --trace")
    trace = read_trace(args.trace)
    requests = list(trace.requests())
    if len(requests) < 2:
        raise ConfigError(f"--trace {args.trace}: it has one request, and a rate needs two at least")
    return Traffic(
        windows=windows_of(requests, args.requests),
        rate=len(requests) / arrival_seconds([request.at_s for request in requests]),
        source=str(args.trace),
        remarks=trace.remarks,
    )


def windows_of(requests: Sequence[SimRequest], most: int) -> tuple[tuple[SimRequest, ...], ...]:
    """Up to NUM_WINDOWS pieces at even distances, with `most` requests in all."""
    num = min(NUM_WINDOWS, max(1, len(requests) // MIN_WINDOW))
    length = min(most, len(requests)) // num
    starts = [i * (len(requests) - length) // max(1, num - 1) for i in range(num)]
    return tuple(tuple(requests[start : start + length]) for start in starts)
