"""The simulator over the schedulers that serve, and what plans with it. Nothing that serves imports it."""

HOW_TO_INSTALL = "pip install 'baton-serve[plan]', in a clone .venv/bin/pip install -e '.[plan]'"
NEEDS = ("matplotlib", "rich", "scipy")
"""What planning imports beside what serves."""
