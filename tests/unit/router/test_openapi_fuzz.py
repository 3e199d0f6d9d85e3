"""Requests made from the OpenAPI document, right ones and wrong ones: no 5xx, no hang, and answers as described."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.patience import PATIENCE_S
from tests.unit.router.fakes import joined_pair
from tests.unit.router.scoring import scored_first_token, scored_story
from tests.unit.router.test_openapi import CALLS, template

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
LEFT_OUT = {
    ("POST", "/fleet/nodes")  # would dial the addresses it is given
}
"""Tried in tests of their own."""
NUM_EXAMPLES = 12


class ServingThread:
    """A router with scripted nodes, on a loop of its own, so that a client may block."""

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="router")
        self.url = ""

    def __enter__(self) -> ServingThread:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        scripts = {"prefill": scored_first_token, "decode": scored_story}
        try:
            async with joined_pair(self._folder, **scripts) as (_, router, _):
                self.url = router.url
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()


@pytest.fixture(scope="module")
def url(model_folder: Path) -> Iterator[str]:
    with ServingThread(model_folder) as serving:
        yield serving.url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def cases() -> list[Any]:
    """Each operation, right and, unless nothing in it can be wrong because any string is a name, wrong."""
    modes = {"right": GenerationMode.POSITIVE, "wrong": GenerationMode.NEGATIVE}
    operations = {(method, template(path)) for method, path, *_ in CALLS}
    can_be_wrong = {(method, template(path)) for method, path, body, _ in CALLS if body or "?" in path}
    return [
        pytest.param(*key, mode, id=f"{key[0]}-{key[1]}-{name}")
        for key in sorted(operations - LEFT_OUT)
        for name, mode in modes.items()
        if name == "right" or key in can_be_wrong
    ]


@pytest.mark.parametrize(("method", "path", "mode"), cases())
def test_requests_made_from_the_document(
    url: str, session: requests.Session, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(session.get(f"{url}/openapi.json", timeout=PATIENCE_S).json())
    operation = schema[path][method]

    @settings(
        max_examples=NUM_EXAMPLES if operation.body else 5,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, session=session, timeout=PATIENCE_S)
        checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
        case.validate_response(response, checks=checks)

    run()
