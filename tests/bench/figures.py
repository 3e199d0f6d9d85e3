"""What one run of a fleet came to, simulated or measured: the same figures, computed by the same code."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.figures import Distribution, Served, Slo, arrival_seconds, distribution
from planner.simulate import Run
from planner.traffic.trace import SimRequest


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    num_reqs: int
    num_failed: int
    """Of those: refused, or without all of their tokens."""
    seconds: float
    """In which the requests arrived."""
    goodput: float
    """Requests a second that met both SLOs."""
    good_share: float
    """Of all requests, those that failed included."""
    ttft_s: Distribution
    itl_s: Distribution
    """Over requests, the mean time between the tokens of each."""


def figures_of(served: Sequence[Served], num_failed: int, seconds: float, slo: Slo) -> Figures:
    """The figures of the requests that arrived within `seconds`, at least one."""
    num_good = sum(one.is_good(slo) for one in served)
    num_reqs = len(served) + num_failed
    return Figures(
        num_reqs=num_reqs,
        num_failed=num_failed,
        seconds=seconds,
        goodput=num_good / seconds,
        good_share=num_good / num_reqs,
        ttft_s=distribution([one.ttft_s for one in served]),
        itl_s=distribution([one.itl_s for one in served]),
    )


def figures_of_run(run: Run, requests: Sequence[SimRequest], slo: Slo) -> Figures:
    """Those of a simulation of `requests`."""
    served = [one for one in run.served if one is not None]
    seconds = arrival_seconds([request.at_s for request in requests]) or 1.0
    return figures_of(served, len(requests) - len(served), seconds, slo)
