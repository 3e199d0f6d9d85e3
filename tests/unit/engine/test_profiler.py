from __future__ import annotations

import gzip
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.engine.profiler import Profiler
from shared.errors import RequestError
from shared.protocol.messages import StartProfile, StopProfile
from tests.golden.serving import Client, node_config, split
from tests.modelzoo import make_model


def start(profiler: Profiler, num_steps: int | None = None) -> str:
    return profiler.start(num_steps=num_steps, with_stack=False, record_shapes=False)


def threads_of_spans(path: Path) -> dict[str, set[int]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans: dict[str, set[int]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            spans.setdefault(event["name"], set()).add(event["tid"])
    return spans


def test_a_trace_names_spans_of_every_thread(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "new"), "d0")

    def work() -> None:
        with profiler.span("forward"):
            torch.ones(4).sum()

    begun = start(profiler)
    with profiler.span("plan"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert profiler.stop() == begun
    spans = threads_of_spans(Path(begun))
    assert len(spans["plan"]) == len(spans["forward"]) == 1
    assert spans["plan"] != spans["forward"]


def test_a_second_trace_gets_a_file_of_its_own(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), "d0")
    paths = []
    for _ in range(2):
        start(profiler)
        paths.append(profiler.stop())
    assert len(set(paths)) == len(list(tmp_path.iterdir())) == 2


def test_it_ends_by_itself_after_so_many_steps_that_worked(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), "d0")
    path = Path(start(profiler, num_steps=2))
    for worked in (True, False, False):
        profiler.step_done(worked)
    assert not path.exists()
    profiler.step_done(True)
    assert path.exists()
    assert profiler.stop() == str(path), "told once"
    with pytest.raises(RequestError, match="no profile is running"):
        profiler.stop()


def test_calls_out_of_their_order_are_refused(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), "d0")
    assert profiler.obey(StopProfile(1)) == (False, "no profile is running")
    assert profiler.obey(StartProfile(2, None, False, False))[0]
    ok, why = profiler.obey(StartProfile(3, None, False, False))
    assert not ok
    assert "running already" in why
    profiler.close()
    profiler.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RequestError, match=r"--profile-dir .*file"):
        start(Profiler(str(file), "d0"))


def test_a_trace_that_cannot_be_written_ends_nothing_but_itself(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    profiler = Profiler(str(folder), "d0")
    for num_steps in (None, 1):
        start(profiler, num_steps)
        folder.rmdir()
        if num_steps is None:
            ok, why = profiler.obey(StopProfile(1))
            assert not ok
            assert "cannot be written" in why
        else:
            profiler.step_done(True)
    start(profiler)
    assert Path(profiler.stop()).exists()


@pytest.mark.parametrize("node", ["p0", "d0"])
def test_the_parts_of_a_step_are_named_on_both_roles(tmp_path: Path, node: str) -> None:
    """One node at a time: the profiler belongs to the process, and here both nodes live in one."""
    config = replace(
        node_config(make_model(tmp_path / "llama", "llama")), profile_dir=str(tmp_path / "traces")
    )
    with split(config) as cluster:
        profiler = cluster.nodes[node].engine.profiler
        start(profiler)
        assert Client(cluster).tokens([[5, 6, 7, 8] * 8])
        spans = threads_of_spans(Path(profiler.stop()))
    assert {"plan", "launch", "forward", "sample", "commit"} <= set(spans)
    assert spans["plan"] == spans["launch"] == spans["commit"]
    assert spans["forward"] == spans["sample"]
    assert spans["forward"] != spans["plan"]
