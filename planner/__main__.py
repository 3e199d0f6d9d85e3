"""`python -m planner plan`: what `router plan` starts. It drives all roles and loads torch: a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, or measure; each imports what the other does not need."""
    command, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if command != "plan":
        print(f"planner: error: {command!r} is not its command, which is plan", file=sys.stderr)
        return 2
    if "--measure" in flags:
        from planner.measure.command import main as measure

        return measure(flags)
    from planner.plan import main as plan

    return plan(flags)


if __name__ == "__main__":
    sys.exit(main())
