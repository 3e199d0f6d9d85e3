"""`python -m planner`: the planner's commands. It drives all roles and loads torch, so it is a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

_MODULES = {
    "plan": "planner.plan",
    "measure": "planner.measure.command",
}
"""Each has a `main`, and imports what others do not need."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names."""
    command, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "plan" and "--measure" in flags:
        command = "measure"
    if command in _MODULES:
        return int(import_module(_MODULES[command]).main(flags))
    print(
        f"planner: error: {command or 'no command'!r} is not a command of it: plan, measure",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
