"""The whole answer of `router plan`: what the table, the JSON file and the HTML file show, and nothing beside it.

    Answer ─┬─ question       what was asked: traffic, SLOs, the profile
            ├─ candidates ─── points: one candidate at one rate, each from real schedulers under a virtual clock
            ├─ verdict        what to run, and why
            └─ remarks        what makes it doubtful

Seconds, tokens, bytes. JSON has no infinities, so what may be infinite is None.
"""

from __future__ import annotations

import msgspec

from planner.figures import Distribution, Slo
from planner.profile import Measured

SCHEMA_VERSION = 4


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over parts of the traffic, and where the true mean lies in 95 of 100 such answers."""

    value: float
    low: float
    high: float

    @property
    def is_more_than_noise(self) -> bool:
        """0 is not within the interval."""
        return self.low > 0 or self.high < 0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate at one rate."""

    rate: float
    """Requests a second that arrive."""
    load: float
    """`rate` over that of the traffic as it was given."""
    num_reqs: int
    num_failed: int
    """Of those: refused, or without all of their tokens."""
    good_share: Estimate
    """Of all requests, those that failed included, which met both SLOs."""
    slo_factor: float | None
    """By what both SLOs would have to be multiplied for `Question.good_share` of the requests to meet them: 0.5 is
    met with half of each bound to spare, 2 misses by as much as the bounds are. None if too many requests fail."""
    ttft_s: Distribution | None
    itl_s: Distribution | None
    """None where no request was served."""
    busy: dict[str, float]
    """Shares of time of prefill and decode nodes, or of nodes together; of the link and the router: `Run.busy`."""
    transfer_bytes_s: float
    """Of KV between nodes, all of them together."""
    cached_share: float
    """Of prompt tokens, those found in a RadixCache."""
    bottleneck: str
    """planner.simulate.Bottleneck: what the requests that missed an SLO waited for longest."""


class CandidateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet."""

    name: str
    num_prefill: int
    """0 where every node does both."""
    num_decode: int
    points: tuple[Point, ...]
    """Ascending rates. One has load 1."""
    max_rate: Estimate | None
    """The highest rate at which `Question.good_share` of the requests meet both SLOs. None where not even the lowest
    rate that was tried does that."""
    max_rate_is_bound: bool
    """It was still met at the highest rate that was tried, so `max_rate` is a lower bound."""

    @property
    def num_nodes(self) -> int:
        """Of both fleets."""
        return self.num_prefill + self.num_decode

    @property
    def now(self) -> Point:
        """At the rate of the traffic as it was given."""
        return min(self.points, key=lambda point: abs(point.load - 1))


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    best: str
    """That with the fewest nodes of those that meet the SLOs at the rate of the traffic, and of those the one with
    the highest rate; if none does, the one that comes nearest."""
    splits: bool
    meets: bool
    """Whether `Question.good_share` of the requests meet both SLOs."""
    tied_with: tuple[str, ...]
    """Of as many nodes, those that are no worse than within the uncertainty. The simplest of all is the best."""
    headline: str
    """One sentence."""
    reasons: tuple[str, ...]
    """Sentences."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that were planned for."""

    source: str
    """The file or the distributions, in words."""
    rate: float
    num_reqs: int
    """That count of those that were simulated for a candidate at one rate."""
    prompt_tokens: Distribution
    output_tokens: Distribution
    reused_share: float
    """Of prompt tokens, those whose block an earlier request has had."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked."""

    at: str
    """ISO 8601, UTC."""
    traffic: Traffic
    slo: Slo
    good_share: float
    """A fleet meets the SLOs if this share of the requests does."""
    profile: str
    """The file that says what every node costs."""
    measured: Measured
    """Where its figures come from."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    schema_version: int = SCHEMA_VERSION
    question: Question
    candidates: tuple[CandidateAnswer, ...]
    verdict: Verdict
    remarks: tuple[str, ...]

    def candidate(self, name: str) -> CandidateAnswer:
        """That of the name."""
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def to_json(self) -> bytes:
        """That a person can read."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
