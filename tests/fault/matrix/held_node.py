"""A real node that a test can hold in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.engine.loop_parts import NodeParts
from shared.engine.node_process import BuildRole, Scheduler, builder_of, run_node
from shared.timeline import Role
from tests.fault.matrix.holding import HeldDecode, HeldPrefill, HeldScheduler, Orders
from tests.fault.matrix.namespaces import enter


def run_held(role: Role, order_path: Path, flags: Sequence[str], namespace: str = "") -> int:
    """Run a node of the role, which obeys the orders in a file. Returns its exit code."""
    if namespace:
        enter(namespace)
    orders = Orders(order_path)

    def held_builder_of(role: Role) -> BuildRole:
        def build_held(parts: NodeParts) -> Scheduler:
            scheduler = builder_of(role)(parts)
            if isinstance(scheduler, PrefillScheduler):
                holds = HeldPrefill(parts, scheduler, orders).holds
            else:
                assert isinstance(scheduler, DecodeScheduler)
                holds = HeldDecode(parts, scheduler, orders).holds
            return HeldScheduler(scheduler, orders, holds)

        return build_held

    parser = make_parser("held-node", "A node that a test can hold in a stage.")
    add_net_flags(parser, 0)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return run_node(role, node_config(parser, flags), held_builder_of)
