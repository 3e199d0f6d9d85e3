"""`python -m planner`: the planner's commands. It drives all roles and loads torch, so it is a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names."""
    command, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "plan" and "--measure" in flags:
        command = "measure"
    if command == "plan":
        from planner import plan

        return plan.main(flags)
    if command == "advise":  # a child of a router's supervisor
        from planner import advise

        return advise.main(flags)
    if command == "measure":
        from planner.measure import command as measure

        return measure.main(flags)
    if command == "autoscale":
        from planner.autoscaler import command as autoscale

        return autoscale.main(flags)
    print(
        f"planner: error: {command or 'no command'!r} is not a command of it: plan, measure, autoscale",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
