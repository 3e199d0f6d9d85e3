"""The simulator over the schedulers that serve, and what plans with it. Nothing that serves imports it."""

from importlib.util import find_spec

from shared.errors import ConfigError

HOW_TO_INSTALL = "pip install 'baton-serve[plan]', in a clone .venv/bin/pip install -e '.[plan]'"
NEEDS = ("matplotlib", "rich", "scipy")
"""What planning imports beside what serves."""


def require_packages() -> None:
    """Raise ConfigError where one of NEEDS is missing."""
    if missing := ", ".join(name for name in NEEDS if find_spec(name) is None):
        raise ConfigError(f"{missing} missing: {HOW_TO_INSTALL}")
