from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.modelzoo import make_model

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """`make_model`, each variant written once per session; its folders are not to be changed."""
    folders: dict[str, Path] = {}

    def folder(architecture: str, **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in folders:
            folders[key] = make_model(tmp_path_factory.mktemp(architecture), architecture, **options)
        return folders[key]

    return folder
