"""`prefill-node`: computes prompts and hands their KV pages to decode nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from prefill_node.peering import DialledPeering
from prefill_node.scheduler import PrefillScheduler
from shared.cli import add_fleet_flags, add_log_flags, add_net_flags, add_node_flags, make_parser, node_config
from shared.engine.node_process import NodeParts, Scheduler, run_node
from shared.kvtransfer.link import make_link_factory
from shared.kvtransfer.sender import SendSide
from shared.protocol.channel import Guests
from shared.timeline import Role

DEFAULT_PORT = 7100


def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Guests]]:
    """The prefill scheduler; nobody but routers dials a prefill node."""
    sender = SendSide(
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
    scheduler = PrefillScheduler(
        parts.engine,
        parts.config.schedule,
        sender,
        DialledPeering(parts.node, parts.control, sender),
        parts.router_port,
        parts.vitals,
        parts.wake,
        parts.config.net.router_timeout_s,
    )
    return scheduler, {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a prefill node until it is told to stop."""
    parser = make_parser("prefill-node", "Computes prompts and hands their KV pages to decode nodes.")
    add_net_flags(parser, DEFAULT_PORT)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    config = node_config(parser.parse_args(argv))
    # Nothing decodes here, so nothing is retracted: no host memory is set aside for it.
    config = replace(config, schedule=replace(config.schedule, retract_policy="recompute"))
    return run_node(Role.PREFILL, config, build_role)


if __name__ == "__main__":
    sys.exit(main())
