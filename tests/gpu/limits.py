"""What the GPU can do, measured in the same run: every other figure is a share of these.

copy       bytes read and written a second by a copy within the GPU: the limit of a decode step
gemm       bf16 products of random matrices: the limit of a prefill
to host    bytes a second to pinned memory, and back: the limit of links that go through the host
"""

from __future__ import annotations

import json

import torch

from tests.gpu.rows import figure
from tests.gpu.steps import Place, Report, Skipped
from tests.gpu.timing import seconds_of

FILE = "limits.json"
COPY_NBYTES, HOST_NBYTES, GEMM_SIZE = 4 << 30, 1 << 30, 8192


def run(place: Place, report: Report) -> None:
    """Measure all, and leave them in the folder of the run."""
    (place.out / FILE).unlink(missing_ok=True)  # no step takes its shares of an earlier run's
    copy, host, size = (1 << 24, 1 << 22, 256) if place.is_dry else (COPY_NBYTES, HOST_NBYTES, GEMM_SIZE)
    limits = {"copy_gb_s": copy_gb_s(place, copy)}
    report(figure("copy", limits["copy_gb_s"], "GB/s", note=f"read and written, {copy >> 20} MiB"))
    limits["gemm_tflop_s"] = gemm_tflop_s(place, size)
    report(figure("gemm", limits["gemm_tflop_s"], "TFLOP/s", note=f"bf16, {size} cubed, random"))
    for direction in ("to_host", "to_device"):
        limits[f"{direction}_gb_s"] = host_gb_s(place, host, direction)
        report(figure(direction, limits[f"{direction}_gb_s"], "GB/s", note="pinned memory"))
    (place.out / FILE).write_text(json.dumps(limits))


def measured(place: Place) -> dict[str, float]:
    """What `run` has left. Raises Skipped."""
    path = place.out / FILE
    if not path.exists():
        raise Skipped("the limits were not measured: run the step `limits` before")
    limits: dict[str, float] = json.loads(path.read_text())
    return limits


def copy_gb_s(place: Place, nbytes: int) -> float:
    """Read and written."""
    source = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8,), device=place.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda i: target.copy_(source), place.device)
    assert torch.equal(source, target)
    return 2 * nbytes / seconds / 1e9


def gemm_tflop_s(place: Place, size: int) -> float:
    """The rate on random values: zeros run faster."""
    a, b = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda i: a @ b, place.device)
    return 2 * size**3 / seconds / 1e12


def host_gb_s(place: Place, nbytes: int, direction: str) -> float:
    """Between pinned memory and the GPU."""
    here = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=place.device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not place.is_dry)
    host.copy_(here)
    source, target = (here, host) if direction == "to_host" else (host, here)
    seconds = seconds_of(lambda i: target.copy_(source, non_blocking=True), place.device)
    return nbytes / seconds / 1e9
