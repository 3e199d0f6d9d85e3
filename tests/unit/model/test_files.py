from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.model import files
from shared.model.files import resolve_model
from tests.patience import PATIENCE_S


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "model", ["", "no-such-folder", "./no/folder", "/no/such/folder", "a/b/c", "~/no-such-folder"]
)
def test_neither_folder_nor_hub_id(model: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub id"):
        resolve_model(model)


def test_an_unreachable_hub_id_is_named(tmp_path: Path) -> None:
    code = "from shared.model.files import resolve_model; resolve_model('nobody/no-such-model')"
    offline = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }  # read when the client is imported
    ended = subprocess.run(
        [sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "ModelError: model 'nobody/no-such-model' " in ended.stderr


def test_the_builtin_model_comes_with_the_package() -> None:
    folder = resolve_model("builtin")
    assert folder.parent == Path(files.__file__).parent
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
