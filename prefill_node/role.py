"""What a prefill node is built of."""

from __future__ import annotations

from prefill_node.scheduler import PrefillScheduler
from shared.engine.node_process import NodeParts, Scheduler
from shared.protocol.channel import Handlers


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
    """The prefill scheduler; nodes that lend to a prefill node dial it."""
    scheduler = PrefillScheduler(
        parts.engine,
        parts.config.schedule,
        parts.transfer.receiver,
        parts.transfer.sender,
        parts.transfer.peering,
        parts.router_port,
        parts.vitals,
        parts.wake.set,
        parts.config.net.router_timeout_s,
    )
    return scheduler, parts.transfer.handlers()
