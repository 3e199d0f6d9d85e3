"""The comparison with other engines: its arithmetic, and how it runs an engine, here a few lines of Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.models import SHAPES
from tests.bench.peers.catalog import PEERS, RUNNERS
from tests.bench.peers.engines import Answers, EngineError, PeerEngine, checked, first_token_at
from tests.bench.peers.rounds import (
    Rounds,
    best_peer,
    first_token_agreement,
    read_limit_s,
    summary,
    workload_rows,
)
from tests.bench.peers.workloads import WORKLOADS
from tests.patience import until

SINGLE, BATCH, _, SHARED = WORKLOADS
SHAPE = SHAPES["llama-160m"]

FAKE_RUNNER = """
import sys, time
from lines import Answers, claim_output, serve

output = claim_output()
print("what an engine prints is in nobody's way")

def generate(prompts, max_new_tokens):
    answers = Answers(len(prompts))
    for index, prompt in enumerate(prompts):
        if prompt == [13]:
            sys.exit("no thirteens")
        for token in range(max_new_tokens):
            answers.add(index, [prompt[0] + token])
    return answers

serve(output, "1.2", generate)
"""


def answers(seconds: float, *first_tokens: int, num_tokens: int = 1, ttft_s: float = 0.0) -> Answers:
    return Answers(
        seconds,
        [ttft_s] * len(first_tokens),
        [seconds] * len(first_tokens),
        [[token, *[0] * (num_tokens - 1)] for token in first_tokens],
    )


def rounds(*of: Answers, read_gb_s: float = 10.0) -> Rounds:
    return Rounds(list(of), [read_gb_s] * len(of))


def test_prompts_are_the_same_for_every_engine_and_new_in_every_round() -> None:
    prompts = SHARED.prompts(0, 32_000)
    assert prompts == SHARED.prompts(0, 32_000)
    assert [len(prompt) for prompt in prompts] == [1088] * 16
    assert all(prompt[:1024] == prompts[0][:1024] for prompt in prompts)
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 16
    firsts = [workload.prompts(r, 32_000)[0][:8] for workload in WORKLOADS for r in range(3)]
    assert len({tuple(first) for first in firsts}) == len(firsts)


def test_the_read_limit_is_weights_and_the_kv_of_half_the_output() -> None:
    bytes_read = SHAPE.weight_nbytes + (512 + 64) * SHAPE.kv_nbytes
    assert read_limit_s(SHAPE, SINGLE, 31.0) == pytest.approx(bytes_read / 31e9)


def test_rows_compare_with_the_peer_that_has_the_least_median_round_by_round() -> None:
    measured = {
        "baton-0P1D": rounds(answers(2.0, 7), answers(2.0, 7)),
        "vllm": rounds(answers(1.0, 7), answers(5.0, 7)),
        "openvino": rounds(answers(2.5, 8), answers(3.0, 7)),
    }
    assert best_peer({name: r.seconds for name, r in measured.items()}) == "openvino"
    baton, vllm, openvino = workload_rows("llama-160m", SHAPE, BATCH, measured)
    assert (baton["against_best"], baton["against_best_spread"]) == (1.38, [1.25, 1.5])
    assert openvino["against_best"] == 1
    assert baton["output_tokens_s"] == 2048.0
    assert (vllm["first_tokens_agree"], openvino["first_tokens_agree"]) == (1, 0.5)
    assert "of_read_limit" not in baton


def test_a_single_stream_is_compared_with_the_read_limit() -> None:
    limit_s = read_limit_s(SHAPE, SINGLE, 20.0)
    done = answers(1.0 + 127 * limit_s / 0.6, 7, num_tokens=128, ttft_s=1.0)
    (row,) = workload_rows("llama-160m", SHAPE, SINGLE, {"baton-1P1D": rounds(done, read_gb_s=20.0)})
    assert row["of_read_limit"] == 0.6
    assert row["ttft_ms"] == 1000.0
    assert "best_peer" not in row


def test_agreement_is_with_what_most_engines_say() -> None:
    given = {"a": [answers(1, 5, 6)], "b": [answers(1, 5, 7)], "c": [answers(1, 4, 7)]}
    assert first_token_agreement(given) == {"a": 0.5, "b": 1.0, "c": 0.5}


def test_the_summary_is_what_targets_ask_for() -> None:
    def row(workload: str, engine: str, **figures: float) -> dict[str, Any]:
        return {"bench": "peers", "workload": workload, "engine": engine, **figures}

    rows = [
        row("single", "openvino", of_read_limit=0.68, against_best=1.0),
        row("single", "baton-0P1D", of_read_limit=0.7, against_best=0.9),
        row("batch", "baton-0P1D", against_best=1.3),
        row("batch", "vllm", against_best=1.0),
        row("shared", "baton-0P1D", against_best=1.1),
        {"bench": "peers_memory", "engine": "baton-0P1D", "peak_mib": 900},
        {"bench": "peers_memory", "engine": "vllm", "peak_mib": 1200},
    ]
    assert summary(rows) == {
        "baton-0P1D_of_read_limit": 0.7,
        "baton-0P1D_least_against_best": 1.1,
        "baton-0P1D_against_best": {"batch": 1.3, "shared": 1.1},
        "baton-0P1D_memory_over_vllm": 0.75,
    }


def test_the_first_token_is_when_the_prefilling_node_goes_on() -> None:
    def stamps(*stages: tuple[str, str, float]) -> list[dict[str, Any]]:
        return [{"role": role, "stage": stage, "time": time} for role, stage, time in stages]

    split = stamps(
        ("prefill", "queued", 1),
        ("decode", "transferring", 2),
        ("prefill", "prefilling", 3),
        ("prefill", "transferring", 4),
        ("decode", "decoding", 5),
        ("decode", "finished", 6),
    )
    assert first_token_at(split) == 4
    assert first_token_at(stamps(("decode", "prefilling", 3), ("decode", "decoding", 5))) == 5


def test_every_peer_has_its_runner_and_requirements_and_none_is_left_over() -> None:
    assert {path.stem for path in RUNNERS.glob("run_*.py")} == {f"run_{name}" for name in PEERS}
    folder = RUNNERS.parent / "requirements"
    assert {path.stem for path in folder.glob("*.txt")} == set(PEERS)
    assert all(peer.venv.requirements.is_file() for peer in PEERS.values())


def test_answers_that_are_not_whole_are_refused() -> None:
    whole = answers(1, 5, 6, num_tokens=3)
    assert checked(whole, 2, 3) is whole
    with pytest.raises(EngineError, match=r"4 tokens for each of 2 .* not \[3, 3\]"):
        checked(whole, 2, 4)


def test_a_runner_answers_is_paused_and_leaves_nothing_when_it_breaks(tmp_path: Path) -> None:
    script = tmp_path / "runner.py"
    script.write_text(FAKE_RUNNER)
    environment = {**os.environ, "PYTHONPATH": str(RUNNERS)}
    with PeerEngine("fake", (sys.executable, str(script)), environment, tmp_path / "log") as engine:
        assert engine.version == "1.2"
        for _ in range(2):
            done = engine.ask([[5], [9]], 3)
            assert done.output_ids == [[5, 6, 7], [9, 10, 11]]
            assert 0 < done.first_token_s[0] <= done.end_s[0] <= done.seconds
            engine.pause()
            until(lambda: statuses() == [psutil.STATUS_STOPPED], "it is stopped")
        assert engine.memory().peak >= engine.memory().proportional > 1 << 20
        with pytest.raises(EngineError, match="no thirteens"):
            engine.ask([[13]], 1)
    assert "nobody's way" in (tmp_path / "log").read_text()
    assert statuses() == []


def statuses() -> Sequence[str]:
    return [child.status() for child in psutil.Process().children() if "runner.py" in child.cmdline()[-1]]
