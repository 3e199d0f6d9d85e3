from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.golden.references import Zoo
from tests.patience import PATIENCE_S
from tests.processes import Router


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    """The official client, of the `router` that a module starts."""
    with openai.OpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client
