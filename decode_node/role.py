"""What a decode node is built of."""

from __future__ import annotations

import msgspec

from decode_node.scheduler import DecodeScheduler
from shared.engine.node_process import NodeParts, Scheduler
from shared.kvtransfer.receiver import KVReceiver
from shared.protocol.channel import Handlers
from shared.protocol.messages import PrefillToDecode


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
    """The decode scheduler; prefill nodes dial a decode node."""
    receiver = parts.transfer_side(KVReceiver)
    parts.control.every(receiver.renewal_s, receiver.renew_leases)
    scheduler = DecodeScheduler(
        parts.engine,
        parts.config.schedule,
        receiver,
        parts.router_port,
        parts.vitals,
        parts.wake.set,
        parts.config.net.router_timeout_s,
    )
    return scheduler, {"prefill": Handlers(msgspec.msgpack.Decoder(PrefillToDecode), receiver.on_message)}
