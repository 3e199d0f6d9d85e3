"""A real node that a test can hold in a stage.

python -m tests.fault.matrix.held_node prefill|decode ORDERS [FLAGS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.engine.node_process import BuildRole, NodeParts, Scheduler, builder_of, run_node
from shared.protocol.channel import Handlers
from shared.timeline import Role
from tests.fault.matrix.holding import HeldDecode, HeldPrefill, HeldScheduler, Orders
from tests.fault.matrix.plants import install, name_as_before


def main() -> int:
    """Run a node of the role, which obeys the orders in a file."""
    orders = Orders(Path(sys.argv[2]))

    def held_builder_of(role: Role) -> BuildRole:
        def build_held(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
            install(role, parts, lambda: orders.current.plants)
            scheduler, handlers = builder_of(role)(parts)
            if isinstance(scheduler, PrefillScheduler):
                holds = HeldPrefill(scheduler, orders).holds
            else:
                assert isinstance(scheduler, DecodeScheduler)
                holds = HeldDecode(parts, scheduler, orders).holds
            return HeldScheduler(scheduler, orders, holds), handlers

        return build_held

    name_as_before(orders.current.plants)
    parser = make_parser("held-node", "A node that a test can hold in a stage.")
    add_net_flags(parser, 0)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return run_node(Role(sys.argv[1]), node_config(parser.parse_args(sys.argv[3:])), held_builder_of)


if __name__ == "__main__":
    sys.exit(main())
