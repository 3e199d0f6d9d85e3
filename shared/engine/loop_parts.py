"""What the loop of a role is built of: the parts of its node, and what both roles make of them alike."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from shared.config import NodeConfig, ScheduleOptions
from shared.engine.build import Engine
from shared.engine.launcher import Launcher
from shared.engine.vitals import Vitals
from shared.kvtransfer.sides import TransferSides
from shared.protocol.router_port import RouterPort
from shared.scheduling.grammar_queue import GrammarQueue


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """The parts of a node that outlive its role's scheduler."""

    config: NodeConfig
    engine: Engine
    transfer: TransferSides
    router_port: RouterPort
    vitals: Vitals
    wake: threading.Event
    """Wakes the loop; any thread may set it."""


def new_launcher(engine: Engine, options: ScheduleOptions) -> Launcher:
    """What runs the batches that are planned, overlapped unless that is switched off."""
    return Launcher(
        engine.stream,
        engine.ledger,
        engine.eos_token_ids,
        overlap=not options.disable_overlap_schedule,
        clock=engine.clock,
        span=engine.profiler.span,
        debug_checks=options.debug_checks,
        snapshot=engine.snapshot,
    )


def new_grammar_queue(parts: NodeParts) -> GrammarQueue:
    """Where requests wait until their grammars are compiled; the loop is woken when one is."""
    engine, options = parts.engine, parts.config.schedule
    return GrammarQueue(
        engine.grammars,
        options.grammar_compile_timeout_s,
        engine.clock,
        parts.wake.set,
        jump_forward=options.enable_jump_forward,
        cpu_clock=engine.cpu_clock,
    )
