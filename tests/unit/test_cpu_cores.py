"""Which cores there are, and who gets which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared import cpu_cores
from shared.cpu_cores import CpuCores, allowed_cores, cpu_quota, one_thread_per_core, own_cores, split_cores

EIGHT = CpuCores(8, tuple(range(8)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


class Machine:
    """Cores that this process may use, as the kernel's files tell of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder

    def has(self, cores: range, quota: float | None = None) -> None:
        self._monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
        self._monkeypatch.setattr(cpu_cores, "cpu_quota", lambda: quota)
        self._monkeypatch.setattr(
            cpu_cores, "one_thread_per_core", lambda cores: one_thread_per_core(cores, self._folder)
        )

    def pairs(self, *siblings: tuple[int, int]) -> None:
        """Each pair of hardware threads is one core."""
        for pair in siblings:
            for core in pair:
                folder = self._folder / f"cpu{core}" / "topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(f"{pair[0]},{pair[1]}\n")


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0", CpuCores(1, (0,))),
        ("5,0-3", CpuCores(5, (0, 1, 2, 3, 5))),
        ("any:4", CpuCores(4)),
    ],
)
def test_what_is_read(machine: Machine, text: str, cores: CpuCores) -> None:
    machine.has(range(8))
    assert CpuCores.parse(text) == cores
    assert CpuCores.parse(str(cores)) == cores


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a list of cores like 0-3,8, nor any:N"),
        ("0-", "not a list of cores"),
        ("0;1", "not a list of cores"),
        ("any", "not a list of cores"),
        ("any:0", "any:0: 0 threads are not between 1 and 8"),
        ("any:9", "any:9: 9 threads are not between 1 and 8: this process may use the cores 0-7"),
        ("2,1-3", "'2,1-3' names a core twice"),
        ("3-1", "ends before it begins"),
        ("0,7-9,12", "0,7-9,12: no core 8-9,12 here; this process may use 0-7"),
    ],
)
def test_what_is_refused(machine: Machine, text: str, reason: str) -> None:
    machine.has(range(8))
    with pytest.raises(ValueError, match=reason):
        CpuCores.parse(text)


@pytest.mark.parametrize(
    ("cores", "num_nodes", "shares"),
    [
        (EIGHT, 1, ["0-7"]),
        (EIGHT, 2, ["0-3", "4-7"]),
        (EIGHT, 3, ["0-2", "3-5", "6-7"]),
        (CpuCores(2, (3, 9)), 2, ["3", "9"]),
        (CpuCores(2, (3, 9)), 5, ["3", "9", "3", "9", "3"]),
        (CpuCores(5), 2, ["any:3", "any:2"]),
        (CpuCores(2), 3, ["any:1", "any:1", "any:1"]),
    ],
)
def test_nodes_share_what_was_named(cores: CpuCores, num_nodes: int, shares: list[str]) -> None:
    assert [str(share) for share in split_cores(cores, num_nodes)] == shares


@pytest.mark.parametrize("cores", [None, CpuCores(2, (0, 1)), CpuCores(2)])
def test_no_nodes_share_nothing(cores: CpuCores | None) -> None:
    """A router may have no nodes of its own."""
    assert split_cores(cores, 0) == []


def test_nodes_share_what_is_there(machine: Machine) -> None:
    machine.has(range(4, 8))
    assert [str(share) for share in split_cores(None, 2)] == ["4-5", "6-7"]
    assert own_cores() == CpuCores(4, (4, 5, 6, 7))


def test_a_second_hardware_thread_is_used_only_for_want_of_cores(machine: Machine) -> None:
    machine.has(range(8))
    machine.pairs((0, 4), (1, 5), (2, 6), (3, 7))
    assert own_cores() == CpuCores(4, (0, 1, 2, 3))
    assert [str(share) for share in split_cores(None, 2)] == ["0-1", "2-3"]
    assert [str(share) for share in split_cores(None, 8)] == [str(core) for core in range(8)]


def test_under_a_quota_nothing_is_pinned(machine: Machine) -> None:
    """Every container of a large machine sees all cores: pinned, they would meet on the first ones."""
    machine.has(range(64), quota=4.5)
    assert own_cores() == CpuCores(4)
    assert [str(share) for share in split_cores(None, 2)] == ["any:2", "any:2"]
    machine.has(range(64), quota=0.5)
    assert [str(share) for share in split_cores(None, 2)] == ["any:1", "any:1"]
    machine.has(range(2), quota=4)
    assert [str(share) for share in split_cores(None, 2)] == ["0", "1"]


def test_the_quota_of_either_version_and_of_every_level(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/c\n")
    groups = tmp_path / "groups"

    def write(path: str, text: str) -> None:
        (groups / path).parent.mkdir(parents=True, exist_ok=True)
        (groups / path).write_text(text)

    assert cpu_quota(own, groups) is None
    write("c/cpu.max", "max 100000\n")
    write("cpu/a/b/cpu.cfs_quota_us", "-1\n")
    write("cpu/a/b/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(own, groups) is None
    write("cpu.max", "350000 100000\n")
    assert cpu_quota(own, groups) == 3.5
    write("cpu/a/cpu.cfs_quota_us", "100000\n")
    write("cpu/a/cpu.cfs_period_us", "50000\n")
    assert cpu_quota(own, groups) == 2
    assert cpu_quota(tmp_path / "no control groups", groups) is None


def test_of_this_machine() -> None:
    assert 1 <= own_cores().num_threads <= len(allowed_cores())
    assert CpuCores.parse(str(allowed_cores()[-1])).num_threads == 1
