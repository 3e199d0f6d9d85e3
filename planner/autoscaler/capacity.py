"""What a node takes while requests meet the SLO, by its profile, and how many such nodes the work of a fleet needs.

prompts    nodes are used so far that the wait behind other prompts leaves the SLO of the first token to GOOD_SHARE
decode     a batch is so large that a step, and the KV that it reads, take no longer than the SLO between tokens;
           there is room for as many requests as run at GOOD_SHARE of all times
pages      a batch holds at most KV_USE of a pool, so that the rest is there for prefixes and for growth

tests/sim/test_autoscaler_capacity.py compares these numbers with the fewest nodes that a simulation needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from planner.cost_model import CostModel
from planner.figures import Slo
from planner.profile import Profile
from shared.errors import ConfigError

GOOD_SHARE = 0.9
"""Of requests that are to meet the SLO."""
_MOST_GOOD = 0.999
"""No queue lets all of its requests wait no longer than some time."""
KV_USE = 0.7
"""Of the pages of a pool, as in the HorizontalPodAutoscaler of deploy/kubernetes."""
MAX_PREFILL_USE = 0.85
MIN_PREFILL_USE = 0.3
"""For prompts that take most of the SLO by themselves, so that no number of nodes would let all of them meet it."""
CATCH_UP_S = 60.0
"""In which prompts that wait are to be computed beside those that arrive."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet of one role has to do. Rates are of the last seconds, all else is of now; sums over its nodes."""

    prompt_tokens_s: float = 0.0
    """Prompt tokens that arrive and are in no cache."""
    num_queued_tokens: float = 0.0
    """Of those, the ones that wait for this fleet alone: not for a decode node."""
    tokens_per_prompt: float = 0.0
    cached_per_prompt: float = 0.0
    """Means; 0 as long as no prompt was seen."""
    output_tokens_s: float = 0.0
    mean_running: float = 0.0
    """Of the last seconds, since few requests come and go by chance."""
    num_running: int = 0
    num_transferring: int = 0
    """On a decode node: their pages are reserved, and a prefill node computes them or sends them."""
    num_waiting: int = 0
    """For pages or a place in a batch."""
    num_held_pages: int = 0
    num_pages: float = 0.0
    """Of one node."""


class PrefillCapacity(NamedTuple):
    """Of one node: prompt tokens a second without a pause, and how many times their own time prompts may wait."""

    tokens_s: float
    waits: float
    """Twice the time that the SLO leaves, over a prompt's own and over what the tail of waits is above their mean."""

    def nodes(self, tokens_s: float, most_use: float = MAX_PREFILL_USE) -> float:
        """For so many tokens a second, where a node may be used up to `most_use`.

        n nodes that are used by u each keep a prompt waiting for u / (1 - u) / 2n of its own time on average (an
        M/D/n queue, of which this is a bound); the tail of waits is taken to be exponential.
        """
        load = tokens_s / self.tokens_s
        by_waits = load / 2 + math.sqrt(load * load / 4 + load / self.waits) if self.waits else math.inf
        return max(min(by_waits, load / MIN_PREFILL_USE), load / most_use)


class DecodeCapacity(NamedTuple):
    """Of one node: the largest batch within the SLO, and the seconds of a step at the SLO."""

    batch: int
    step_s: float
    spread: float
    """How many standard deviations above its mean the number of running requests may be."""

    def nodes(self, tokens_s: float) -> float:
        """For so many tokens a second. Those that run at once are as many as Poisson arrivals have it."""
        running = tokens_s * self.step_s
        return (running + self.spread * math.sqrt(running)) / self.batch


class Demand(NamedTuple):
    """How many nodes the work needs, and how many must stay for what runs. Both are fractions of nodes."""

    nodes: float
    floor: float
    words: str


class Capacity:
    """Of nodes as in `profile`, under `slo`, which `good_share` of the requests are to meet.

    Raises ConfigError for an SLO that not even an idle node meets.
    """

    def __init__(self, profile: Profile, slo: Slo, good_share: float = GOOD_SHARE) -> None:
        forward = profile.forward
        for flag, given_s, least_s, what in (
            ("--slo-ttft-ms", slo.ttft_s, forward.extend_s([(0, 1)]), "the prefill of a single token"),
            ("--slo-itl-ms", slo.itl_s, _step_s(forward, 1, 1), "a decode step of a single request"),
        ):
            if given_s <= least_s:
                raise ConfigError(
                    f"{flag} {1e3 * given_s:g}: by the profile {what} takes {1e3 * least_s:.1f} ms, so that no "
                    "number of nodes meets it"
                )
        self._profile = profile
        self._slo = slo
        share = min(good_share, _MOST_GOOD)
        self._tail = -math.log(1 - share)
        """Of an exponential distribution: so many times its mean are exceeded by the share that need not be good."""
        self._spread = max(0.0, NormalDist().inv_cdf(share))

    def prefill(self, tokens: float, cached: float) -> PrefillCapacity:
        """For prompts of so many tokens, of which so many are cached."""
        forward, chunk = self._profile.forward, self._profile.node.chunked_prefill_size
        begin, end = round(cached), max(round(tokens), round(cached) + 1)
        starts = range(begin, end, chunk)
        alone_s = sum(forward.extend_s([(start, min(chunk, end - start))]) for start in starts)
        # Prompts that wait are computed together, a chunk at a time, so they share what each forward costs.
        shared_s = forward.extend_s([(begin, end - begin)]) - forward.a
        share = (end - begin) / chunk
        tokens_s = (end - begin) / max(forward.a * share + shared_s, forward.floor_s * share)
        waits = 2 * max(0.0, self._slo.ttft_s - alone_s) / (alone_s * self._tail)
        return PrefillCapacity(tokens_s, waits)

    def decode(self, kv_tokens: float, num_pages: float) -> DecodeCapacity:
        """For requests that hold so much KV each, on a node with so many pages."""
        node, forward, itl_s = self._profile.node, self._profile.forward, self._slo.itl_s
        in_time = min(
            _quotient(itl_s - forward.d, forward.e + forward.f * kv_tokens),
            _quotient(itl_s - forward.step_s, forward.step_request_s),
        )
        in_pages = _quotient(KV_USE * num_pages * node.page_size, kv_tokens)
        batch = max(1.0, min(in_time, node.max_running_requests, in_pages))
        return DecodeCapacity(int(batch), _step_s(forward, batch, kv_tokens), self._spread)

    def demand(self, work: Work, *, is_decode: bool, num_live: int, coming_s: Sequence[float]) -> Demand:
        """The nodes that `work` needs, if `num_live` have it and others come in `coming_s` seconds.

        One that is asked for now comes after `start_s`. It has to catch up with what waits then, not with what waits
        now: so the growth of a queue while nodes start is no reason to ask for more.
        """
        if not is_decode:
            return self._prompts(work, num_live, coming_s, MAX_PREFILL_USE)
        # Prompts stop the tokens of a node that does both: the time they leave must do for a batch's steps.
        most_use = MAX_PREFILL_USE * (1 - self._profile.forward.d / self._slo.itl_s)
        prompts = self._prompts(work, num_live, coming_s, most_use)
        placed = work.num_running + work.num_transferring
        # Requests that prefill nodes keep waiting hold pages here, and more decode nodes would not help them.
        waiting = work.num_waiting * (work.num_running / placed if placed else 1.0)
        kv_tokens = work.num_held_pages * self._profile.node.page_size / max(1, placed)
        node = self.decode(kv_tokens, work.num_pages)
        batch, by_tokens = node.batch, node.nodes(work.output_tokens_s)
        by_batch = (work.mean_running + waiting) / batch
        words = (
            f"{work.mean_running:.1f} requests run and {waiting:.0f} wait, {batch} for a node"
            if by_batch > by_tokens
            else f"{work.output_tokens_s:.0f} tokens/s, {batch / node.step_s:.0f} for a full node"
        )
        return Demand(
            prompts.nodes + max(by_tokens, by_batch),
            max((placed + work.num_waiting) / batch, prompts.floor),
            f"{words}; and {prompts.words}" if prompts.nodes else words,
        )

    def _prompts(self, work: Work, num_live: int, coming_s: Sequence[float], most_use: float) -> Demand:
        if not work.tokens_per_prompt:
            return Demand(0.0, 0.0, "no prompts")
        node = self.prefill(work.tokens_per_prompt, work.cached_per_prompt)
        tokens_s = node.tokens_s
        start_s = self._profile.node.start_s
        computed_s = num_live * start_s + sum(max(0.0, start_s - due) for due in coming_s)
        waiting = max(0.0, work.num_queued_tokens + work.prompt_tokens_s * start_s - tokens_s * computed_s)
        by_queue = (work.prompt_tokens_s + waiting / CATCH_UP_S) / tokens_s
        words = (
            f"{work.prompt_tokens_s:.0f} prompt tokens/s and {work.num_queued_tokens:.0f} queued, "
            f"{tokens_s:.0f}/s for a busy node"
        )
        nodes = max(node.nodes(work.prompt_tokens_s, most_use), by_queue)
        return Demand(nodes, work.num_queued_tokens / CATCH_UP_S / tokens_s, words)


def _step_s(forward: CostModel, batch: float, kv_tokens: float) -> float:
    """A decode step: the device's time hides the scheduler's, or that the device's."""
    device_s = forward.d + batch * (forward.e + forward.f * kv_tokens)
    return max(device_s, forward.step_s + batch * forward.step_request_s)


def _quotient(a: float, b: float) -> float:
    return a / b if b > 0 else math.inf
