"""The families of models that are served, one in each file of this folder: `families()` finds them.

The router imports these files, so none of them imports torch.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from shared.model.family import Family


def families() -> dict[str, Family[Any]]:
    """Every file's FAMILY, by its architecture."""
    found = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]
    return {family.architecture: family for family in found}
