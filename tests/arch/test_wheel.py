"""What an installed package has: every file of its folders, the built-in model and the page among them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "prefill_node", "decode_node", "router", "planner")


def test_a_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    files = {
        path.relative_to(tmp_path).as_posix()
        for name in PACKAGES
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    }
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    assert {"shared/model/builtin/model.safetensors", "router/page/index.html"} <= files
