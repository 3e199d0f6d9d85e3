"""What a prefill node is built of."""

from __future__ import annotations

import time

from prefill_node.peering import REDIAL_S, DialledPeering
from prefill_node.scheduler import PrefillScheduler
from shared.engine.node_process import NodeParts, Scheduler
from shared.kvtransfer.sender import KVSender
from shared.protocol.channel import Handlers


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
    """The prefill scheduler; only routers dial a prefill node."""
    sender = parts.transfer_side(KVSender)
    peering = DialledPeering(parts.node, parts.control, sender, time.monotonic)
    parts.control.every(REDIAL_S / 2, peering.redial)
    scheduler = PrefillScheduler(
        parts.engine,
        parts.config.schedule,
        sender,
        peering,
        parts.router_port,
        parts.vitals,
        parts.wake.set,
        parts.config.net.router_timeout_s,
    )
    return scheduler, {}
