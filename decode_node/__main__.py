"""`decode-node`: receives KV pages from prefill nodes and generates tokens from them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from decode_node.scheduler import DecodeScheduler
from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.engine.node_process import NodeParts, Scheduler, run_node
from shared.kvtransfer.link import make_link_factory
from shared.kvtransfer.receiver import ReceiveSide
from shared.protocol.channel import Guests
from shared.protocol.messages import PrefillToDecode
from shared.timeline import Role

DEFAULT_PORT = 7200


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Guests]]:
    """The decode scheduler; prefill nodes dial a decode node."""
    receiver = ReceiveSide(
        node=parts.node,
        layout=parts.engine.layout,
        pages=parts.engine.pool,
        outbox=parts.control,
        link_factory=make_link_factory(
            parts.config.transfer.backend, parts.config.transfer, parts.engine.pool.device
        ),
        clock=time.monotonic,
        options=parts.config.transfer,
        wake=parts.wake.set,
    )
    scheduler = DecodeScheduler(
        parts.engine,
        parts.config.schedule,
        receiver,
        parts.router_port,
        parts.vitals,
        parts.wake,
        parts.config.net.router_timeout_s,
    )
    return scheduler, {"prefill": Guests(msgspec.msgpack.Decoder(PrefillToDecode), receiver.on_message)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a decode node until it is told to stop."""
    parser = make_parser(
        "decode-node", "Receives KV pages from prefill nodes and generates tokens from them."
    )
    add_net_flags(parser, DEFAULT_PORT)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return run_node(Role.DECODE, node_config(parser.parse_args(argv)), build_role)


if __name__ == "__main__":
    sys.exit(main())
