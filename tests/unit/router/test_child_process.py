"""A child process is started again, after a longer pause each time, and killed when its heart stands still."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from router.processes.child_process import ChildFailed, ChildProcess, stop_all
from tests.patience import eventually

READY = "import os, sys, time; os.write(0, b'LR.'); "


def child(source: str, **options: object) -> ChildProcess:
    return ChildProcess("node", "n", lambda: ["-c", source], **options)  # type: ignore[arg-type]


async def ends_of(source: str, count: int = 1, **options: object) -> list[tuple[str, float]]:
    """How a child ended so many times, and the pauses after that."""
    ends: list[tuple[str, float]] = []
    dying = child(source, on_exit=lambda code, *how: ends.append(how), **options)
    dying.start()
    await eventually(lambda: len(ends) >= count)
    await stop_all([dying], 5)
    return ends[:count]


async def test_pauses_between_lives_grow() -> None:
    ends = await ends_of(READY + "sys.exit(7)", 3)
    assert ends == [("exited with code 7", pause_s) for pause_s in (0.5, 1.0, 2.0)]


async def test_a_child_that_has_lived_long_is_started_again_soon() -> None:
    ends = await ends_of(READY + "time.sleep(0.2)", 2, pauses_s=(0.02, 0.1))
    assert [pause_s for _, pause_s in ends] == [0.02, 0.02]


async def test_a_child_that_was_never_ready_is_not_started_again() -> None:
    failing = child("raise SystemExit(3)")
    failing.start()
    assert failing.keeper is not None
    with pytest.raises(ChildFailed, match=r"node n .*code 3 "):
        await failing.keeper
    await stop_all([failing], 5)


@pytest.mark.parametrize(("code", "is_final"), [(1, False), (-9, False), (2, True), (3, True)])
async def test_a_child_that_had_loaded_ends_for_good_only_when_it_gave_up(code: int, is_final: bool) -> None:
    exits: list[str] = []
    end = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    waiting = child(
        f"import os, sys; os.write(0, b'L'); {end}", on_exit=lambda code, how, _: exits.append(how)
    )
    waiting.start()
    assert waiting.keeper is not None
    if is_final:
        with pytest.raises(ChildFailed, match=f"code {code} "):
            await waiting.keeper
    else:
        await eventually(lambda: exits or waiting.keeper.done())
    await stop_all([waiting], 5)


async def test_a_child_that_cannot_be_started_again_is_tried_again() -> None:
    exits: list[str] = []
    sources: Iterator[str] = iter(
        (READY, "#" * 10_000_000)  # no argument is that long
    )
    dying = ChildProcess(
        "node",
        "n",
        lambda: ["-c", next(sources, READY + "time.sleep(60)")],
        on_exit=lambda code, how, _: exits.append(how),
    )
    num_files = psutil.Process().num_fds()
    dying.start()
    assert dying.keeper is not None
    await eventually(lambda: len(exits) == 2)
    await stop_all([dying], 5)
    assert exits == ["exited with code 0", "could not be started: Argument list too long"]
    assert psutil.Process().num_fds() == num_files


async def test_a_child_that_can_never_be_started() -> None:
    impossible = child("#" * 10_000_000)
    impossible.start()
    assert impossible.keeper is not None
    with pytest.raises(ChildFailed, match="Argument list too long"):
        await impossible.keeper


async def test_a_child_whose_heart_stands_still_is_killed() -> None:
    ends = await ends_of(READY + "time.sleep(60)", heartbeat_timeout_s=1.5)
    assert ends[0][0] == "was killed by SIGKILL"


async def test_a_child_whose_heart_beats_lives_on() -> None:
    beat = "os.write(0, b'.'); time.sleep(0.1)"
    ends = await ends_of(f"{READY}\nfor _ in range(40): {beat}", heartbeat_timeout_s=2)
    assert ends[0][0] == "exited with code 0"


async def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    ignoring = child(
        f"import signal; signal.signal({signal.SIGTERM:d}, signal.SIG_IGN); {READY} time.sleep(60)"
    )
    ignoring.start()
    await ignoring.ready.wait()
    await stop_all([ignoring], 0.3)
