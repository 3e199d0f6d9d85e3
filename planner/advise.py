"""`python -m planner advise`: would another number of nodes serve the traffic of the last ten minutes better?

    routers ──a line for each request──▶ Recent ──each minute──▶ advise ──Advice──▶ supervisor ──▶ routers

The supervisor of a router with --plan-profile starts it. Lines are those of --log-requests, with the fleet that the
router sees.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from planner.candidate import Candidate
from planner.figures import Slo, arrival_seconds
from planner.plan_sample import Option, Sample
from planner.plan_search import Aim
from planner.plan_trials import Setting, Trial, Trials
from planner.profile import Profile, load_plan_profiles
from planner.simulate import Run, fleet_shape
from planner.traffic.arrival import Arrival
from planner.traffic.router_log import RouterLog
from planner.traffic.trace import SimRequest, TraceRow, scaled
from planner.traffic.windows import Window, draw_windows, whole_window
from router.api.live_feed import Advice
from router.api.prefix_hashes import BLOCK_TOKENS
from router.http.config import PlanOptions
from router.processes.child_process import LOADED, READY
from shared.errors import ConfigError
from shared.flags import FlagParser, add_flags, options_of, whole
from shared.log import crash

WINDOW_S = 600.0
EVERY_S = 60.0
"""Between two advices. The first comes when there are MIN_REQS."""
POLL_S = 0.5
MIN_REQS = 20
MOST_REQS = 400
"""That count in the simulation of one fleet. Of more, windows are drawn."""
NUM_WINDOWS = 4
MOST_MORE = 2
"""Nodes more than there are, that are tried."""
NICENESS = 19
"""It takes the cores only while no other process wants them."""

_FLEET = re.compile(rb" fleet=(\d+)P(\d+)D\b")
_STDIN = 0


class Recent:
    """The requests of the last WINDOW_S, and the fleet that served them. Lines come from another thread."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._lock = threading.Lock()
        self._log = RouterLog()
        self.fleet: Candidate | None = None
        """None until a router has told it."""
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def take(self, line: bytes) -> None:
        """A request has ended."""
        arrivals = list(self._log(line))  # counts those that were refused
        fleet = _FLEET.search(line)
        with self._lock:
            self._arrivals += arrivals
            if fleet is not None:
                self.fleet = Candidate(num_prefill=int(fleet[1]), num_decode=int(fleet[2]))

    def requests(self, now: float) -> list[SimRequest]:
        """Those that arrived within WINDOW_S before `now` (s since 1970), in order; the first at 0 s."""
        with self._lock:
            lately = sorted(one for one in self._arrivals if one.at_s > now - WINDOW_S)
            self._arrivals = deque(lately)
        names: dict[object, int] = {}
        rows = [
            TraceRow(
                at_s - lately[0].at_s,
                max(input_len, 1),
                max(output_len, 1),
                tuple(names.setdefault(block, len(names)) for block in blocks),
            )
            for at_s, input_len, output_len, blocks in lately
        ]
        return list(scaled(rows, scale=1, block_tokens=self._log.block_tokens or BLOCK_TOKENS))

    def refused(self) -> int:
        """How many requests were refused since the last call."""
        before, self._num_refused = self._num_refused, self._log.num_refused
        return self._num_refused - before


async def advise(
    requests: Sequence[SimRequest],
    fleet: Candidate,
    profiles: tuple[Profile, Profile],
    aim: Aim,
    now_s: float,
) -> Advice:
    """Whether `fleet` meets the SLOs; if not, which with the fewest nodes more does, else whether one less would.

    From the fleet on, one role is varied at a time: 10 simulations at most, however many nodes there are.
    """

    def advice(words: str, meets: bool | None, better: Sample | None) -> Advice:
        name = None if better is None else better.option.candidate.name
        return Advice(words, f"{fleet.num_prefill}P{fleet.num_decode}D", now_s, meets, name)

    if len(requests) < MIN_REQS:
        return advice(
            f"{MIN_REQS} requests are needed to plan for; in the last {WINDOW_S / 60:g} minutes: {len(requests)}",
            None,
            None,
        )
    prefill, decode = profiles
    windows = _windows(requests, fleet.num_nodes * decode.node.pool_tokens)
    setting = Setting(screen=windows[0], windows=windows, prefill=prefill, decode=decode, slo=aim.slo)

    async def run(trial: Trial) -> Run:
        return setting.run(trial)

    trials = Trials(setting, run)

    async def serve(candidate: Candidate) -> Sample:
        return await trials.sample(Option(candidate=candidate), setting.whole)

    now = await serve(fleet)
    if aim.is_met_by(now):
        smaller = [await serve(candidate) for candidate in _neighbours(fleet, -1)]
        enough = [sample for sample in smaller if aim.is_met_by(sample)]
        if not enough:
            words = ", and with one node less would not" if smaller else ""
            return advice(_words(now, aim) + words, True, None)
        best = _best(_alike(enough, fleet), aim)
        return advice(
            f"{_words(now, aim)}; {_nodes(fleet, best)} would as well ({_share(best, aim)})", True, best
        )
    tried, near = [now], fleet
    for num_more in range(MOST_MORE + 1):
        samples = [await serve(candidate) for candidate in _neighbours(near, min(num_more, 1))]
        tried += samples
        if enough := [sample for sample in samples if aim.is_met_by(sample)]:
            best = _best(_alike(enough, fleet), aim)
            return advice(
                f"{_nodes(fleet, best)} would meet the SLOs ({_share(best, aim)} of the requests); "
                f"{_nodes(best.option.candidate, now, 'do not')} ({_share(now, aim)})",
                False,
                best,
            )
        if num_more:
            near = _best(_alike(samples, fleet), aim).option.candidate
    best = _best(tried, aim)
    return advice(
        f"{fleet.name} does not meet the SLOs ({_share(now, aim)} of the requests), and no fleet that was tried, "
        f"with up to {MOST_MORE} nodes more, would; {best.option.candidate.name} comes nearest ({_share(best, aim)})",
        False,
        None,
    )


def _windows(requests: Sequence[SimRequest], cache_tokens: int) -> tuple[Window, ...]:
    """All requests, or of more than MOST_REQS some windows that stand for them. A single batch has no windows."""
    seconds = arrival_seconds([request.at_s for request in requests])
    if len(requests) <= MOST_REQS or not seconds:
        return (whole_window(requests),)
    window_s = MOST_REQS / NUM_WINDOWS * seconds / len(requests)
    windows = draw_windows(
        requests,
        cache_tokens=cache_tokens,
        num_windows=NUM_WINDOWS,
        window_s=window_s,
        min_warmup_s=window_s / 2,
        max_warmup_s=2 * window_s,
        tail_s=window_s / 2,
    )
    return tuple(window for window in windows if any(map(window.counts, window.requests)))


def _neighbours(fleet: Candidate, num_more: int) -> Iterator[Candidate]:
    """Fleets with `num_more` nodes more: one role changes, or both by a node where the number stays.

    The same machines together are one of them; nodes that do both are never advised to split.
    """
    num_nodes, num_prefill = fleet.num_nodes + num_more, fleet.num_prefill
    of_prefill = (
        {num_prefill + 1, num_prefill - 1} if num_more == 0 else {num_prefill, num_prefill + num_more}
    )
    for num in sorted({0, *of_prefill} if fleet.splits else {0}):
        other = replace(fleet, num_prefill=num, num_decode=num_nodes - num)
        if other != fleet and other.num_decode >= 1:
            yield other


def _alike(samples: Sequence[Sample], fleet: Candidate) -> Sequence[Sample]:
    """Those that split as the fleet does, if any: a node more is less of a change than the same machines together."""
    return [one for one in samples if one.option.candidate.splits is fleet.splits] or samples


def _best(samples: Sequence[Sample], aim: Aim) -> Sample:
    return max(samples, key=lambda sample: sample.point(aim.slo, aim.good_share).good_share.value)


def _share(sample: Sample, aim: Aim) -> str:
    return f"{sample.point(aim.slo, aim.good_share).good_share.value:.0%}"


def _words(now: Sample, aim: Aim) -> str:
    return f"{now.option.candidate.name} meets the SLOs ({_share(now, aim)} of the requests)"


def _nodes(other: Candidate, sample: Sample, verb: str = "") -> str:
    """`3 prefill nodes` where nothing else differs from the `other` fleet, else `3P2D`; and what it does."""
    fleet = sample.option.candidate
    num, role = 1, ""
    if other.splits is fleet.splits and other.num_decode == fleet.num_decode:
        num, role = fleet.num_prefill, "prefill "
    elif other.num_prefill == fleet.num_prefill:
        num, role = fleet.num_decode, "decode " if fleet.splits else ""
    words = f"{num} {role}node{'s' * (num != 1)}" if role else fleet.name
    return f"{words} {verb if num != 1 else verb.replace('do', 'does')}".rstrip()


def main(argv: Sequence[str]) -> int:
    """Advise until the supervisor is gone. Returns 2 for a profile that is no good."""
    args = _parse(argv)
    options = options_of(PlanOptions, args)
    try:
        options.check()
        profiles = load_plan_profiles(options)
        fleet_shape(Candidate(num_prefill=1, num_decode=1), *profiles)  # pages of two sizes cannot move
    except ConfigError as error:
        print(f"router: error: {error}", file=sys.stderr)
        return 2
    os.nice(NICENESS)
    slo = Slo(ttft_s=options.slo_ttft_ms / 1e3, itl_s=options.slo_itl_ms / 1e3)  # type: ignore[operator]
    aim = Aim(slo=slo, good_share=options.good_share)
    recent = Recent()
    threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
    threading.Thread(target=_read, args=(args.traffic_fd, recent), name="traffic", daemon=True).start()
    os.write(_STDIN, LOADED + READY)
    advised_at = -math.inf
    while True:
        time.sleep(POLL_S)
        fleet, is_first = recent.fleet, advised_at == -math.inf
        if time.monotonic() < advised_at + EVERY_S or fleet is None or not fleet.num_decode:
            continue
        if not is_first or len(recent) >= MIN_REQS:
            now_s = time.time()
            advice = asyncio.run(advise(recent.requests(now_s), fleet, profiles, aim, now_s))
            if num_refused := recent.refused():
                words = (
                    f"{advice.words}. Requests that were refused meanwhile are not planned for: {num_refused}"
                )
                advice = msgspec.structs.replace(advice, words=words)
            os.write(args.advice_fd, msgspec.msgpack.encode(advice))
            advised_at = time.monotonic()


def _parse(argv: Sequence[str]) -> Namespace:
    parser = FlagParser(prog="planner advise", allow_abbrev=False)
    add_flags(parser, "plan", PlanOptions)
    parser.add_argument("--traffic-fd", type=whole(0), required=True)
    parser.add_argument("--advice-fd", type=whole(0), required=True)
    return parser.parse_args(argv)


def _read(fd: int, recent: Recent) -> None:
    try:
        with os.fdopen(fd, "rb") as lines:
            for line in lines:
                recent.take(line)
    except Exception:
        crash("traffic_failed")
        os._exit(1)


def _end_with_supervisor() -> None:
    while os.read(_STDIN, 1024):
        pass
    os._exit(0)
