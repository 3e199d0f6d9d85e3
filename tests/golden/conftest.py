from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.references import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def llama(zoo: Zoo) -> Path:
    return zoo.folder("llama")
