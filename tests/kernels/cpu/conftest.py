from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from shared.kernels.cpu.build import NativeUnavailable, cpu_flags
from shared.kernels.cpu.library import NO_BF16, Team, is_bf16_slow, load_library

BUILDS = {
    "as-built": (),
    "emulated-amx": ("-DBATON_EMULATE_AMX",),
    "plain-avx512": (*NO_BF16, "-mno-avx512vnni", "-mno-avx512vbmi", "-mno-amx-tile"),
    "avx2": ("-mno-avx512f", "-mno-amx-tile"),
    "plain-avx2": ("-mno-avx512f", "-mno-avxvnni", "-mno-amx-tile"),
}
if is_bf16_slow() and "avx512_bf16" in cpu_flags():
    BUILDS["avx512-bf16"] = ("-mavx512bf16",)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=BUILDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels as this CPU gets them, and as others would."""
    try:
        return load_library(*BUILDS[request.param])
    except NativeUnavailable as e:
        pytest.skip(f"NO NATIVE KERNELS: {e}")


@pytest.fixture
def team(library: ctypes.CDLL) -> Iterator[Team]:
    team = Team(library, [0, 0])
    yield team
    team.close()
