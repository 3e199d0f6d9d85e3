"""Runs `sglang.benchmark.serving`, the module behind `python -m sglang.bench_serving`, without SGLang's engine.

SGLang's packages import the engine, and with it CUDA libraries, when they are imported themselves. Here they are bare
packages with the same files; of the engine the benchmark uses one constant, which is given below. All the code of the
benchmark itself is SGLang's, unchanged.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""As in sglang/srt/disaggregation/utils.py; only used with --fake-prefill."""


def bare_package(name: str, folder: Path) -> types.ModuleType:
    """A package whose modules can be imported, and whose own code does not run."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


installed = next(Path(entry) / "sglang" for entry in sys.path if (Path(entry) / "sglang").is_dir())
bare_package("sglang", installed)
bare_package("sglang.srt", installed / "srt")
bare_package("sglang.srt.utils", installed / "srt" / "utils")
bare_package("sglang.srt.disaggregation", installed / "srt" / "disaggregation")
constants = bare_package("sglang.srt.disaggregation.utils", installed)
constants.FAKE_BOOTSTRAP_HOST = FAKE_BOOTSTRAP_HOST  # type: ignore[attr-defined]
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
