from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.matrix.fleet_nodes import make_fleet_key
from tests.fault.matrix.namespaces import Namespaces, why_no_namespaces
from tests.fault.slow_model import SlowModel
from tests.modelzoo import make_model
from tests.processes import Fleet


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> SlowModel:
    return SlowModel.make(tmp_path_factory.mktemp("models") / "slow")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    if why_no_namespaces():
        pytest.skip(f"no network namespaces: {why_no_namespaces()}")
    with Namespaces(("p0", "d0", "d1")) as network:
        yield network


@pytest.fixture
def common(tiny_model: Path, tmp_path: Path) -> tuple[str, ...]:
    """The flags of nodes and routers alike."""
    return ("--model", str(tiny_model), *make_fleet_key(tmp_path))


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """The `shared_fleet` that a module starts, whole and empty, whatever the test before did."""
    shared_fleet.mend()
    return shared_fleet
