"""The traffic that a plan is made for: a trace, the busiest part of a long one, or requests that are drawn."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner import answer
from planner.figures import arrival_seconds, distribution
from planner.traffic.distribution import Lengths, drawn_trace
from planner.traffic.reading import TraceFormat, read_trace
from planner.traffic.trace import SimRequest, Trace, shared_tokens
from shared.errors import ConfigError


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival, from 0 s on."""

    requests: tuple[SimRequest, ...]
    source: str
    remarks: tuple[str, ...] = ()
    num_warmup: int = 0
    """The first so many fill caches and queues, and do not count."""

    @property
    def counted(self) -> tuple[SimRequest, ...]:
        """The requests that count."""
        return self.requests[self.num_warmup :]

    @cached_property
    def seconds(self) -> float:
        """In which the requests that count arrive."""
        return arrival_seconds([request.at_s for request in self.counted])

    @property
    def rate(self) -> float:
        """Requests a second, of those that count."""
        return len(self.counted) / self.seconds

    @property
    def record(self) -> answer.Traffic:
        """What an answer says of it."""
        return answer.Traffic(
            source=self.source,
            rate=self.rate,
            num_reqs=len(self.counted),
            prompt_tokens=distribution([request.input_len for request in self.counted]),
            output_tokens=distribution([request.output_len for request in self.counted]),
            reused_share=shared_tokens(self.requests) / sum(request.input_len for request in self.requests),
        )


def traffic_of(args: Namespace) -> Traffic:
    """The traffic that the flags name. Raises ConfigError."""
    trace, source = _trace(args)
    start = busiest(trace.requests, args.requests)
    first = max(0, start - args.requests)
    part = trace.requests[first : start + args.requests]
    traffic = Traffic(
        tuple(replace(one, at_s=one.at_s - part[0].at_s) for one in part), source, num_warmup=start - first
    )
    num = len(traffic.counted)
    if not traffic.seconds:
        raise ConfigError(
            f"{source}: all {num} requests to plan for arrive at one time, and a plan needs a rate, which takes two "
            "times at least"
        )
    remarks = trace.remarks
    if num < len(trace.requests):
        remarks += (
            f"Of the {len(trace.requests)} requests, the {num} that follow each other fastest stand for all, after "
            f"{traffic.num_warmup} that fill caches and queues: the plan is for that rate.",
        )
    return replace(traffic, remarks=remarks)


def busiest(requests: Sequence[SimRequest], num: int) -> int:
    """The first of the `num` requests that arrive within the shortest time; 0 where there are no more than these.

    `requests` are in order of arrival.
    """
    starts = range(len(requests) - num + 1)
    return min(starts, key=lambda at: requests[at + num - 1].at_s - requests[at].at_s, default=0)


def _trace(args: Namespace) -> tuple[Trace, str]:
    drawn = {name: getattr(args, name) for name in ("rate", "prompt", "output")}
    if args.trace is not None:
        if named := [f"--{name}" for name, value in drawn.items() if value is not None]:
            raise ConfigError(f"{named[0]} is for traffic without a trace; with --trace it says nothing")
        return read_trace(args.trace, args.trace_format and TraceFormat(args.trace_format)), str(args.trace)
    if missing := [f"--{name}" for name, value in drawn.items() if value is None]:
        raise ConfigError(
            f"it needs --trace, or --rate, --prompt and --output; missing: {', '.join(missing)}"
        )
    prompt, output = (Lengths.parse(f"--{name}", drawn[name]) for name in ("prompt", "output"))
    trace = drawn_trace(
        rate=args.rate, prompt=prompt, output=output, num_requests=args.requests, seed=args.seed
    )
    return trace, f"--rate {args.rate:g} --prompt {args.prompt} --output {args.output}"
