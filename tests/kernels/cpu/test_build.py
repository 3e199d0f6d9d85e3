"""The builder with a compiler that only pretends, so that this runs on any machine."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.kernels.cpu.build import (
    NativeUnavailable,
    build_library,
    find_compiler,
    invalid_cxx,
    open_library,
)
from shared.kernels.cpu.library import is_bf16_slow
from tests.patience import PATIENCE_S

COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec cat "$0.version"
echo "$@" >> "$0.calls"
[ -f "$0.error" ] && { cat "$0.error" >&2; exit 1; }
sleep 0.1
while [ "$1" != -o ]; do shift; done
echo "no library" > "$2"
"""


class Compiler:
    """What `$CXX` names, and two files for it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "pretending-c++"
        self._path.write_text(COMPILER)
        self._path.chmod(0o755)
        self.set("version", "1.0")
        self.source, self.header = folder / "one.cpp", folder / "one.h"
        self.source.write_text("int one;")
        self.header.write_text("#pragma once")

    def set(self, what: str, text: str) -> None:
        self._path.with_name(f"{self._path.name}.{what}").write_text(text)

    def num_libraries(self) -> int:
        calls = self._path.with_name(f"{self._path.name}.calls").read_text()
        return calls.count(" -shared ")

    def build(self, *flags: str) -> Path:
        return build_library("one", [self.source], [self.header], flags=flags)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "pretending-c++"))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return compiler


def test_those_that_ask_at_once_get_one_library(compiler: Compiler, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compiler.build(), range(4)))
    assert len(set(found)) == 1 and compiler.num_libraries() == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        [found[0].name, "one.lock"]
    ), "nothing is left of building"


def test_who_asks_is_told_of_a_build_and_only_of_a_build(compiler: Compiler) -> None:
    told: list[str] = []
    for name in ("built", "cached"):
        build_library(
            "one", [compiler.source], [compiler.header], on_build=lambda name=name: told.append(name)
        )
    assert told == ["built"]


def test_whatever_decides_the_code_decides_the_name(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [compiler.build(), compiler.build("-DONE")]
    compiler.header.write_text("#pragma twice")
    found.append(compiler.build())
    compiler.source.write_text("int two;")
    found.append(compiler.build())
    compiler.set("version", "1.1")
    found.append(compiler.build())
    monkeypatch.setattr("shared.kernels.cpu.build._cpu_info", {"flags": ["avx2", "fma"]}.__getitem__)
    found.append(compiler.build())
    assert len(set(found)) == len(found) == compiler.num_libraries()
    assert compiler.build() == found[-1]


def test_without_a_compiler_what_was_built_before_is_found(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = compiler.build()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert compiler.build() == built
    compiler.header.write_text("#pragma twice")
    with pytest.raises(NativeUnavailable, match="compiler"):
        compiler.build()


def test_a_compiler_that_is_not_there_is_said(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invalid_cxx() is None
    monkeypatch.setenv("CXX", "no-such-c++")
    assert invalid_cxx() == "$CXX=no-such-c++, which is not there"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match="no-such-c"):
        find_compiler()
    monkeypatch.delenv("CXX")
    assert invalid_cxx() is None


def test_the_compilers_own_words_are_the_reason(compiler: Compiler, tmp_path: Path) -> None:
    compiler.set("error", "one.cpp:1: no -std=c++20 here")
    with pytest.raises(NativeUnavailable, match=r"one\.cpp:1: no -std"):
        compiler.build()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["one.lock"]


def test_a_cache_that_cannot_be_written(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(compiler.source / "cache"))
    with pytest.raises(NativeUnavailable, match="Not a directory"):
        compiler.build()


def test_a_user_without_a_home(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as numbers that no /etc/passwd knows."""

    def expanduser(path: str) -> str:
        return path

    monkeypatch.setattr("os.path.expanduser", expanduser)
    for name in ("BATON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NativeUnavailable, match="home directory"):
        compiler.build()


def test_a_library_that_cannot_be_loaded(compiler: Compiler) -> None:
    """As on a file system that is mounted noexec."""
    with pytest.raises(NativeUnavailable, match=r"one-.*\.so"):
        open_library("one", [compiler.source], [compiler.header])


@pytest.mark.usefixtures("native_kernels")
def test_threads_that_cannot_start() -> None:
    """An exception of C++ would end the process."""
    script = """if True:
        import resource
        from pathlib import Path
        from shared.kernels.cpu.build import NativeUnavailable
        from shared.kernels.cpu.library import Team, load_library
        library = load_library()
        Team(library, [-1, -1]).close()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        try:
            Team(library, [-1] * 4096)
        except NativeUnavailable as reason:
            print(reason)
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stdout.startswith("4096 threads cannot be started"), ended


@pytest.mark.parametrize(
    ("vendor", "flags", "is_slow"),
    [
        ("GenuineIntel", ["avx512_bf16"], True),
        ("GenuineIntel", ["avx512_bf16", "amx_bf16"], False),
        ("AuthenticAMD", ["avx512_bf16"], False),
    ],
)
def test_bf16_is_slow_on_intels_without_amx(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: list[str], is_slow: bool
) -> None:
    info = {"vendor_id": [vendor], "flags": flags}
    monkeypatch.setattr("shared.kernels.cpu.build._cpu_info", info.__getitem__)
    assert is_bf16_slow() == is_slow
