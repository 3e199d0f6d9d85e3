"""Requests made from the OpenAPI document, right ones and wrong ones: no 5xx, no hang, and answers as described."""

from __future__ import annotations

import asyncio
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


def cases(mode: GenerationMode) -> list[tuple[str, str]]:
    """Each operation; for wrong requests those in which something can be wrong, since any string is a name."""
    can_be_wrong = {(method, template(path)) for method, path, body, _ in CALLS if body or "?" in path}
    operations = {(method, template(path)) for method, path, *_ in CALLS}
    return sorted((can_be_wrong if mode is GenerationMode.NEGATIVE else operations) - LEFT_OUT)


def ask_as_described(url: str, method: str, path: str, mode: GenerationMode) -> None:
    with requests.Session() as session:
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


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
async def test_requests_made_from_the_document(model_folder: Path, mode: GenerationMode) -> None:
    scripts: dict[str, Any] = {"prefill": scored_first_token, "decode": scored_story}
    async with joined_pair(model_folder, **scripts) as (_, router, _):
        for method, path in cases(mode):
            await asyncio.to_thread(ask_as_described, router.url, method, path, mode)
