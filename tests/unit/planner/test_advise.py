"""What the planner advises for the traffic of the last minutes, and the lines that it learns that traffic from."""

from __future__ import annotations

import asyncio
import math
import os
import select
from pathlib import Path

import pytest

from planner.advise import MIN_REQS, MOST_REQS, NUM_WINDOWS, WINDOW_S, Recent, advise
from planner.candidate import Candidate
from planner.figures import Slo
from planner.plan_search import Aim
from planner.plan_trials import Setting, Trial
from planner.simulate import Run
from planner.traffic.trace import SimRequest, shared_tokens
from router.api.live_feed import Advice
from router.api.traffic_pipe import TrafficPipe
from tests.patience import until
from tests.processes import NODE_FLAGS, Router, assert_gone
from tests.unit.planner.plan_rig import PROFILE

NOW = 1_000_000.0


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def trace(at_s: float, prompt_len: int = 128, prefixes: str = "q3Zl0c1mW5g=") -> dict[str, object]:
    return {
        "arrived_ms": int(at_s * 1e3),
        "prompt_lens": prompt_len,
        "output_lens": 7,
        "prefixes": prefixes,
        "prefix_tokens": 64,
        "prefix_key": "5bd1e995",
    }


def test_lines_of_a_router_become_requests(pipe: tuple[int, int]) -> None:
    told, recent = TrafficPipe(pipe[1], lambda: "2P1D"), Recent()
    for at_s in (NOW - WINDOW_S - 1, NOW - 2, NOW - 5):
        told.tell(trace(at_s))
    for line in os.read(pipe[0], 1 << 16).splitlines():
        recent.take(line)
    requests = recent.requests(NOW)
    assert [(one.at_s, one.input_len, one.output_len) for one in requests] == [(0, 128, 7), (3, 128, 7)]
    assert shared_tokens(requests) == 64
    assert recent.fleet == Candidate(num_prefill=2, num_decode=1)


def test_a_long_prompt_keeps_the_hashes_that_fit_into_a_line(pipe: tuple[int, int]) -> None:
    told, recent = TrafficPipe(pipe[1], lambda: "1P1D"), Recent()
    told.tell(trace(NOW, 64_000, prefixes="q3Zl0c1m" * 1333))
    line = os.read(pipe[0], 1 << 16)
    assert line.count(b"\n") == 1 and select.PIPE_BUF - 32 < len(line) <= select.PIPE_BUF
    recent.take(line.rstrip())
    (request,) = recent.requests(NOW)
    assert request.input_len == 64_000 and len(request.blocks) == 1000


def test_a_full_pipe_loses_lines_and_holds_up_nothing(pipe: tuple[int, int]) -> None:
    told = TrafficPipe(pipe[1], lambda: "1P1D")
    while not told.num_lost:
        told.tell(trace(NOW))
    lines = os.read(pipe[0], 1 << 20).splitlines(keepends=True)
    assert len(set(lines)) == 1 and lines[0].endswith(b"\n")
    told.tell(trace(NOW))
    assert told.num_lost == 1


def test_a_line_of_too_many_prompts_is_lost_whole(pipe: tuple[int, int]) -> None:
    told = TrafficPipe(pipe[1], lambda: "1P1D")
    told.tell({**trace(NOW), "prompt_lens": ";".join(["64"] * 2000), "prefixes": ";" * 1999})
    told.tell(trace(NOW))
    assert told.num_lost == 1 and os.read(pipe[0], 1 << 16).count(b"\n") == 1


def test_refused_requests_are_counted(pipe: tuple[int, int]) -> None:
    told, recent = TrafficPipe(pipe[1], lambda: "1P1D"), Recent()
    told.tell({"route": "POST", "status": 429})
    recent.take(os.read(pipe[0], 1 << 16))
    assert (len(recent), recent.refused(), recent.refused()) == (0, 1, 0)


def ask(
    fleet: str, rate: float, *, num: int = 80, itl_s: float = 1.0, input_len: int = 3900, output_len: int = 4
) -> Advice:
    """A node of the profile computes a prompt in about half a second, if its length is not given."""
    prefill, decode = map(int, fleet.removesuffix("D").split("P"))
    blocks = math.ceil(input_len / 64)
    requests = [
        SimRequest(i / rate, input_len, output_len, tuple(range(100 * i, 100 * i + blocks)), 64)
        for i in range(num)
    ]
    aim = Aim(slo=Slo(ttft_s=1.5, itl_s=itl_s), good_share=0.9)
    now = Candidate(num_prefill=prefill, num_decode=decode, local_prefill_tokens=0)
    return asyncio.run(advise(requests, now, (PROFILE, PROFILE), aim, NOW))


def test_too_little_traffic() -> None:
    advice = ask("1P1D", 1.0, num=MIN_REQS - 1)
    assert (
        advice.meets is None and advice.better is None and advice.words.endswith(f"minutes: {MIN_REQS - 1}")
    )


def test_more_nodes_where_prefill_is_short() -> None:
    advice = ask("1P1D", rate=3.5, itl_s=0.008, output_len=40)
    assert (advice.meets, advice.fleet, advice.at) == (False, "1P1D", NOW)
    assert advice.better is not None and int(advice.better[0]) > 1 and advice.better[1:] == "P1D"
    assert advice.words.startswith(f"{advice.better[0]} prefill nodes would meet the SLOs")
    assert "1 prefill node does not" in advice.words


def test_the_same_machines_together_where_that_is_enough() -> None:
    assert ask("1P1D", rate=6.0).better == "3 together"


def test_a_node_less_where_it_is_idle() -> None:
    advice = ask("2P1D", rate=0.2)
    assert (advice.meets, advice.better) == (True, "1P1D")
    assert "1 prefill node would as well" in advice.words


def test_a_fleet_that_has_no_node_to_spare() -> None:
    advice = ask("1P1D", rate=0.2, num=30)
    assert advice.meets and advice.better in (None, "1 together")
    alone = ask("0P1D", rate=0.2, num=30)
    assert alone.meets and "node less" not in alone.words


def test_more_requests_than_one_simulation_has_are_planned_by_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """About MOST_REQS requests count, from all over the ten minutes."""
    counted: list[int] = []
    run = Setting.run

    def count(setting: Setting, trial: Trial) -> Run:
        if trial.option.candidate.name == "1P1D":
            window = setting.windows[trial.window]
            counted.extend(one.blocks[0] // 100 for one in window.requests if window.counts(one))
        return run(setting, trial)

    monkeypatch.setattr(Setting, "run", count)
    assert ask("1P1D", rate=4.0, num=900, input_len=256).meets is True
    assert 0.8 * MOST_REQS <= len(set(counted)) == len(counted) <= 1.2 * MOST_REQS
    assert {number * NUM_WINDOWS // 900 for number in counted} == set(range(NUM_WINDOWS)), "each quarter"


def test_one_large_batch() -> None:
    """Its requests all arrive at the same time."""
    advice = ask("1P1D", rate=math.inf, num=MOST_REQS + 1, input_len=16)
    assert advice.meets is True


def test_no_fleet_that_would_do() -> None:
    advice = ask("1P1D", rate=0.5, itl_s=1e-4)
    assert (advice.meets, advice.better) == (False, None)
    assert "no fleet that was tried, with up to 2 nodes more, would" in advice.words


def test_a_large_fleet_takes_as_few_simulations_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    run = Setting.run

    def count(setting: Setting, trial: Trial) -> Run:
        tried.append(trial.option.candidate.name)
        return run(setting, trial)

    monkeypatch.setattr(Setting, "run", count)
    ask("10P10D", rate=5.0, itl_s=1e-4, num=MIN_REQS)
    assert len(tried) == len(set(tried)) == 10
    assert tried[:7] == ["10P10D", "20 together", "9P11D", "11P9D", "21 together", "10P11D", "11P10D"]


@pytest.mark.processes
def test_a_router_shows_what_its_planner_advises(tmp_path: Path) -> None:
    """The processes of `router --plan-profile`: requests reach the planner, and its advice /fleet and the page."""
    profile = tmp_path / "profile.json"
    PROFILE.save(profile)
    slos = ("--slo-ttft-ms", "60000", "--slo-itl-ms", "60000")
    flags = (*NODE_FLAGS, "--max-total-tokens", "4096", "--plan-profile", str(profile), *slos)
    with Router(tmp_path, "--local", "1P1D", *flags) as router:
        router.wait_ready()
        for _ in range(MIN_REQS):
            router.generate("def f(x):", 4).tokens()
        until(lambda: router.get("/fleet")[1]["advice"], "it advises")
        advice = router.get("/fleet")[1]["advice"]
        assert advice.startswith("1P1D meets the SLOs (100% of the requests)")
        assert router.get("/live/state")[1]["advice"] == advice
        family = router.family()
        assert router.stop() == 0
        assert_gone(family)
        router.assert_clean_log()
