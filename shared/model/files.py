"""Finds the files of a model: in a folder, on the hub, or in this package for the built-in model.

The router imports this file, so this file never imports torch.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from shared.errors import ModelError

BUILTIN_MODEL = "builtin"

_BUILTIN_FOLDER = Path(__file__).resolve().parent / "builtin"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
_WEIGHT_FILES = ["*.safetensors"]
# Some repositories hold the weights twice, the second time in their authors' own format.
_SECOND_COPIES = ["consolidated*", "original/*"]


def resolve_model(model: str, *, with_weights: bool = True) -> Path:
    """Return the folder of `model`: "builtin", a local folder, or a hub id such as Qwen/Qwen3-0.6B.

    The files of a hub id come from the hub's cache, or are downloaded. `with_weights=False` leaves the weights out,
    for a router, which needs the config and the tokenizer only. Raises ModelError when there is no such folder or
    id.
    """
    if model == BUILTIN_MODEL:
        return _BUILTIN_FOLDER
    folder = Path(os.path.expanduser(model))
    if model and folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise ModelError(f"model {model!r} is a file; give the folder that holds its config.json")
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "~")):
        raise ModelError(f"model {model!r} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B")
    return _download(model, _TEXT_FILES + (_WEIGHT_FILES if with_weights else []))


def _download(hub_id: str, allow_patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a local folder

    try:
        return Path(snapshot_download(hub_id, allow_patterns=allow_patterns, ignore_patterns=_SECOND_COPIES))
    except Exception as e:  # the hub client's transports each raise their own errors
        cause = str(e).strip().split("\n", 1)[0] or type(e).__name__
        raise ModelError(
            f"model {hub_id!r} is not a folder here, and the hub could not provide it: {cause}"
        ) from e
