"""`prefill-node`: computes prompts and hands their KV pages to decode nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.timeline import Role

DEFAULT_PORT = 7100


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill node until it is told to stop."""
    parser = make_parser("prefill-node", "Computes prompts and hands their KV pages to decode nodes.")
    add_net_flags(parser, DEFAULT_PORT)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    config = node_config(parser, argv)
    # Torch takes seconds to import: --help and a wrong flag do not wait for it.
    from shared.engine.node_process import run_node

    return run_node(Role.PREFILL, config)


if __name__ == "__main__":
    sys.exit(main())
