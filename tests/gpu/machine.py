"""What a run was made on, and what the questions of `make bench-gpu` need to know of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

import torch

from tests.bench.machine import cpu_model
from tests.gpu.rows import Row, Verdict, figure
from tests.gpu.steps import Place, Report

PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pyzmq", "fastapi", "xgrammar")
TOOLS = ("make", "cc", "compute-sanitizer", "nvidia-smi", "ncu")
"""Triton builds its launcher with `cc` (or what $CC names), and needs the headers of Python for that."""


def run(place: Place, report: Report) -> None:
    """A row for each fact."""
    report(figure("python", platform.python_version()))
    for package in PACKAGES:
        report(figure(package, _version(package)))
    report(figure("host", cpu_model(), note=f"{os.cpu_count()} cores, Linux {platform.release()}"))
    for tool in TOOLS:
        report(figure(tool, shutil.which(tool) or "not here"))
    if place.is_dry:
        return
    of = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    report(
        figure(
            "GPU",
            of.name,
            note=f"sm_{of.major}{of.minor}, {of.multi_processor_count} SMs, {of.L2_cache_size >> 20} MiB of L2",
            uuid=str(of.uuid),
        )
    )
    report(figure("GPU memory", free / 2**30, "GiB free", note=f"of {total / 2**30:.1f} GiB"))
    report(_triton(place))


def _triton(place: Place) -> Row:
    """Whether a kernel can be compiled and launched here at all."""
    try:
        from tests.gpu.tile_kernel import tile_product

        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=place.device)
        works = bool((tile_product(ones, ones, num_warps=4) == 64).all())
    except Exception as error:  # whatever it is, no kernel runs here
        return Row(what="Triton", verdict=Verdict.FAIL, note=f"{type(error).__name__}: {error}")
    return Row(what="Triton", verdict=Verdict.PASS if works else Verdict.FAIL, note="a product of ones")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not here"
