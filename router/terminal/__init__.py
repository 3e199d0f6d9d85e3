"""`router top` and `router generate`: a running router, seen and used from a terminal.

They are clients: nothing here imports what serves, so they start at once. HTTP is the standard library's: three
calls need no more, and another library would be one more thing to import and to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS = ("top", "generate")


def run(command: str, argv: Sequence[str]) -> int:
    """Run one of COMMANDS; returns its exit code."""
    if command == "top":
        from router.terminal.top import main
    else:
        from router.terminal.generate import main  # only one of the two is needed
    return main(argv)
