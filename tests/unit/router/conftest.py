from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.config import HttpOptions
from router.text.served_model import ServedModel
from tests.unit.router.fakes import HERMES, TOOLS_TEMPLATE, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.load("tiny", model_folder, HttpOptions())


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of no known family, whose template shows tools and calls."""
    return write_model(tmp_path_factory.mktemp("chats"), chat_template=TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls and reasons as hermes does."""
    return write_model(tmp_path_factory.mktemp("hermes"), chat_template=HERMES)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No client may make the router, uvicorn or asyncio log an error or a traceback."""
    yield
    loud = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR or r.exc_info]
    assert not loud, loud
