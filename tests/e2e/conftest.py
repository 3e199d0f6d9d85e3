from __future__ import annotations

from collections.abc import Generator, Iterator

import openai
import pytest
import torch

from tests.golden.references import Zoo
from tests.patience import PATIENCE_S
from tests.processes import Router, attach_logs


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    attach_logs(item, report)
    return report
