"""The traffic that a plan is made for: windows of a trace, or of requests that are drawn from distributions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from planner import answer
from planner.figures import arrival_seconds, distribution
from planner.traffic.distribution import Lengths, drawn_trace
from planner.traffic.reading import TraceFormat, read_trace
from planner.traffic.trace import SimRequest, Trace, shared_tokens
from planner.traffic.windows import Window, draw_windows, whole_window
from shared.errors import ConfigError

NUM_WINDOWS = 6
"""Of a trace that is longer than what is simulated."""


@dataclass(frozen=True)
class Traffic:
    """Requests in windows, each of which is simulated on its own."""

    windows: tuple[Window, ...]
    source: str
    remarks: tuple[str, ...] = ()

    @property
    def requests(self) -> list[SimRequest]:
        """Those that count."""
        return [one for window in self.windows for one in window.requests if window.counts(one)]

    @cached_property
    def record(self) -> answer.Traffic:
        """What an answer says of it."""
        requests = self.requests
        all_tokens = sum(one.input_len for window in self.windows for one in window.requests)
        return answer.Traffic(
            source=self.source,
            rate=self.windows[0].trace_rate,
            num_reqs=len(requests),
            prompt_tokens=distribution([request.input_len for request in requests]),
            output_tokens=distribution([request.output_len for request in requests]),
            reused_share=sum(shared_tokens(window.requests) for window in self.windows) / all_tokens,
        )


def traffic_of(args: Namespace, cache_tokens: int) -> Traffic:
    """The traffic that the flags name, for fleets whose KV pools hold `cache_tokens`. Raises ConfigError."""
    trace, source = _trace(args)
    requests = trace.requests
    if not arrival_seconds([request.at_s for request in requests]):
        raise ConfigError(f"{source} has one request, and a plan needs a rate, which takes two at least")
    windows = [whole_window(requests)]
    if len(requests) > args.requests:
        window_s = args.requests / NUM_WINDOWS / windows[0].trace_rate
        windows = draw_windows(
            requests,
            cache_tokens=cache_tokens,
            num_windows=NUM_WINDOWS,
            window_s=window_s,
            min_warmup_s=min(30.0, window_s),
            max_warmup_s=4 * window_s,
            tail_s=min(30.0, window_s / 2),
            seed=args.seed,
        )
        windows = [window for window in windows if any(map(window.counts, window.requests))]
    return Traffic(tuple(windows), source, (*trace.remarks, *_remarks(windows, requests)))


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


def _remarks(windows: Sequence[Window], requests: Sequence[SimRequest]) -> list[str]:
    remarks = []
    if len(windows) > 1:
        counted = chain.from_iterable(filter(window.counts, window.requests) for window in windows)
        remarks.append(
            f"Of the {len(requests)} requests, {sum(1 for _ in counted)} in {len(windows)} windows stand for all; "
            "the intervals say how far that may mislead."
        )
    if cold := sum(not window.is_warm for window in windows):
        remarks.append(
            f"In {cold} of {len(windows)} windows the caches are not as full as they would be, so less reuse is "
            "planned than there is."
        )
    return remarks
