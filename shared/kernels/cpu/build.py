"""C++ to a shared library, once for each version of the sources, compiler and CPU.

Libraries lie in a cache of the user: `$BATON_CACHE_DIR`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`. Each
use touches a library; one that was not used for 30 days goes when another version of it is built.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import xxhash

from shared import log

FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-pthread")
_COMPILE_TIMEOUT_S = 300
_UNUSED_S = 30 * 24 * 3600.0


class NativeUnavailable(Exception):
    """Native kernels cannot be had here; the message says why."""


def do_nothing() -> None:
    """What is called by default when a build begins."""


def open_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    *,
    flags: Sequence[str] = (),
    on_build: Callable[[], None] = do_nothing,
) -> ctypes.CDLL:
    """Build a library (see `build_library`) and load it. Raises NativeUnavailable."""
    build = partial(build_library, name, sources, headers, flags=flags, on_build=on_build)
    path = build()
    try:
        return _load(path)
    except NativeUnavailable:
        if path.exists():
            raise
    return _load(build())  # another process, which had found it unused, has removed it just now


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # a cache mounted noexec; a file cut short by a crash
        raise NativeUnavailable(f"the native kernels cannot be loaded: {error}") from error


def build_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    *,
    flags: Sequence[str] = (),
    on_build: Callable[[], None] = do_nothing,
) -> Path:
    """The shared library `name` made of `sources`, from the cache if they were built before.

    `on_build` is called where they were not, before this process builds them or waits for another that does.
    Processes that ask at the same time build it once. Without a compiler one that was built here by any does.
    Raises NativeUnavailable: no compiler, no writable cache, or the compiler's own words.
    """
    all_flags = (*FLAGS, *flags)
    folder = cache_folder()
    try:
        stem = f"{name}-{_key(all_flags, [*sources, *headers])}"
        try:
            compiler = find_compiler()
        except NativeUnavailable:
            if built := sorted(folder.glob(f"{stem}-*.so")):  # an image whose compiler was taken out again
                return _used(built[0])
            raise
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"{stem}-{_version(compiler)}.so"
        if library.exists():
            return _used(library)
        on_build()
        with _locked(folder / f"{name}.lock"):
            if not library.exists():
                _remove_unused(folder, name)
                _build(compiler, all_flags, sources, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the native kernels cannot be built: {error}") from error
    return library


def find_compiler() -> str:
    """`$CXX`, g++, c++ or clang++. Raises NativeUnavailable."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable(f"there is no C++ compiler ({missing_cxx() or '$CXX'}, g++, c++ or clang++)")


def missing_cxx() -> str | None:
    """What `$CXX` says where that is no program, so that another compiler is taken; else None."""
    name = os.environ.get("CXX")
    return f"$CXX={name}, which is not there" if name and shutil.which(name) is None else None


def cache_folder() -> Path:
    """Where libraries are kept. Raises NativeUnavailable where nothing says so."""
    if own := os.environ.get("BATON_CACHE_DIR"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError as error:  # a container's user that is only a number
        raise NativeUnavailable(f"no cache for native kernels ($BATON_CACHE_DIR): {error}") from error


def cpu_flags() -> frozenset[str]:
    """What the kernel says of the CPU (`flags` in /proc/cpuinfo); empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()[2:]) for line in lines if line.startswith("flags")), frozenset())


def _key(flags: Sequence[str], files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for part in (" ".join(flags), platform.machine(), " ".join(sorted(cpu_flags()))):
        digest.update(part.encode() + b"\0")
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _version(compiler: str) -> str:
    words = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    )
    return xxhash.xxh3_64_hexdigest(compiler.encode() + b"\0" + words.stdout)


def _used(library: Path) -> Path:
    with suppress(OSError):  # a cache that others fill, and that this user may only read
        os.utime(library)
    return library


def _remove_unused(folder: Path, name: str) -> None:
    """Remove versions of a library that were not used for 30 days. A loaded one stays so until its process ends.

    In a cache that several users fill, a version of another user cannot be removed, and stays. A user that may only
    read the cache cannot mark a version as used, so that one is removed after 30 days in use, and built anew.
    """
    for library in folder.glob(f"{name}-*.so"):
        with suppress(OSError):
            if time.time() - library.stat().st_mtime > _UNUSED_S:
                library.unlink()
                log.event("removed_unused_kernels", library=library.name)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, flags: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    log.event("building_native_kernels", library=library.name, compiler=compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        _run_all(
            [compiler, *flags, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        )
        made = Path(scratch) / library.name
        _run_all([[compiler, *flags, "-shared", *objects, "-o", str(made)]])
        made.replace(library)


def _run_all(commands: Iterator[list[str]] | list[list[str]]) -> None:
    """Run commands side by side; NativeUnavailable with the first error's own words."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        ends = [
            (process.communicate(timeout=_COMPILE_TIMEOUT_S)[1], process.returncode) for process in running
        ]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for words, code in ends:
        if code != 0:
            raise NativeUnavailable(f"the native kernels do not compile: {words.strip()[-2000:]}")
