"""Builds C++ into a shared library, once for each version of the sources, the compiler and the CPU.

Libraries are cached in `$BATON_CACHE_DIR`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from shared import log

FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
"""Without `-ffp-contract=off` a compiler chooses which products and sums are rounded once."""

_COMPILE_TIMEOUT_S = 300


class NativeUnavailable(Exception):
    """The native kernels cannot be built or loaded. The message says why."""


def do_nothing() -> None:
    """The default of `on_build`."""


def open_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    *,
    flags: Sequence[str] = (),
    on_build: Callable[[], None] = do_nothing,
) -> ctypes.CDLL:
    """Build a library with `build_library`, and load it. Raises NativeUnavailable."""
    path = build_library(name, sources, headers, flags=flags, on_build=on_build)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # the cache is mounted noexec, or a crash truncated the file
        raise NativeUnavailable(f"the native kernels cannot be loaded: {error}") from error


def build_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    *,
    flags: Sequence[str] = (),
    on_build: Callable[[], None] = do_nothing,
) -> Path:
    """Return the path of the shared library `name`, which is built of `sources` unless the cache has it.

    `on_build` is called before this process builds the library, or waits for another process that does. Processes
    that call this at the same time build it once. Without a compiler, a cached library of any compiler is used.
    Raises NativeUnavailable without a compiler or a writable cache, and with the compiler's message when it fails.
    """
    all_flags = (*FLAGS, *flags)
    folder = cache_folder()
    try:
        stem = f"{name}-{_hash_of(all_flags, [*sources, *headers])}"
        try:
            compiler = find_compiler()
        except NativeUnavailable:
            if built := sorted(folder.glob(f"{stem}-*.so")):  # a container image without its compiler
                return built[0]
            raise
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"{stem}-{_version_of(compiler)}.so"
        if library.exists():
            return library
        on_build()
        with _locked(folder / f"{name}.lock"):
            if not library.exists():
                _build(compiler, all_flags, sources, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the native kernels cannot be built: {error}") from error
    return library


def find_compiler() -> str:
    """Find `$CXX`, g++, c++ or clang++. Raises NativeUnavailable."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable(f"there is no C++ compiler ({invalid_cxx() or '$CXX'}, g++, c++ or clang++)")


def invalid_cxx() -> str | None:
    """Describe a `$CXX` that is not a program, so that another compiler is used. None where it is one."""
    name = os.environ.get("CXX")
    return f"$CXX={name}, which is not there" if name and shutil.which(name) is None else None


def cache_folder() -> Path:
    """Return the folder of the cache. Raises NativeUnavailable for a user without a home folder."""
    if own := os.environ.get("BATON_CACHE_DIR"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError as error:  # a container may run as a user id without an account
        raise NativeUnavailable(f"no cache for native kernels ($BATON_CACHE_DIR): {error}") from error


def cpu_flags() -> frozenset[str]:
    """Return the `flags` of /proc/cpuinfo. Empty where there is no such file."""
    return frozenset(_cpu_info("flags"))


def is_intel() -> bool:
    """Whether /proc/cpuinfo says so."""
    return _cpu_info("vendor_id") == ["GenuineIntel"]


def _cpu_info(field: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[2:] for line in lines if line.split(maxsplit=1)[:1] == [field]), [])


def _hash_of(flags: Sequence[str], files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for part in (" ".join(flags), platform.machine(), " ".join(sorted(cpu_flags()))):
        digest.update(part.encode() + b"\0")
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _version_of(compiler: str) -> str:
    words = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    )
    return xxhash.xxh3_64_hexdigest(compiler.encode() + b"\0" + words.stdout)


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
    """Run commands in parallel. Raises NativeUnavailable with the message of the first that fails."""
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
