from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.router.fakes import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No client may make the router, uvicorn or asyncio log an error or a traceback."""
    yield
    loud = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR or r.exc_info]
    assert not loud, loud
