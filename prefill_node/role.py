"""What a prefill node is built of."""

from __future__ import annotations

from prefill_node.peering import DialledPeering
from prefill_node.scheduler import PrefillScheduler
from shared.engine.node_process import NodeParts, Scheduler
from shared.kvtransfer.sender import SendSide
from shared.protocol.channel import Guests


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Guests]]:
    """The prefill scheduler; nobody but routers dials a prefill node."""
    sender = parts.transfer_side(SendSide)
    scheduler = PrefillScheduler(
        parts.engine,
        parts.config.schedule,
        sender,
        DialledPeering(parts.node, parts.control, sender),
        parts.router_port,
        parts.vitals,
        parts.wake.set,
        parts.config.net.router_timeout_s,
    )
    return scheduler, {}
