"""A real node that a test can hold in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from shared.engine.loop_parts import NodeParts
from shared.engine.node_process import BuildRole, Scheduler, builder_of
from shared.timeline import Role
from tests.fault.matrix.holding import HeldDecode, HeldPrefill, HeldScheduler, Orders
from tests.fault.matrix.namespaces import enter
from tests.fault.matrix.plants import install
from tests.forked import run_altered_node


def run_held(role: Role, order_path: Path, flags: Sequence[str], namespace: str = "") -> int:
    """Run a node of the role, which obeys the orders in a file. Returns its exit code."""
    if namespace:
        enter(namespace)
    orders = Orders(order_path)

    def held_builder_of(role: Role) -> BuildRole:
        def build_held(parts: NodeParts) -> Scheduler:
            install(role, parts, lambda: orders.current.plants)
            scheduler = builder_of(role)(parts)
            if isinstance(scheduler, PrefillScheduler):
                holds = HeldPrefill(parts, scheduler, orders).holds
            else:
                assert isinstance(scheduler, DecodeScheduler)
                holds = HeldDecode(parts, scheduler, orders).holds
            return HeldScheduler(scheduler, orders, holds)

        return build_held

    return run_altered_node(role, flags, held_builder_of)
