"""What the loops of both roles have in common, built from an engine and the node's options."""

from __future__ import annotations

from collections.abc import Callable

from shared.config import ScheduleOptions
from shared.engine.build import Engine
from shared.engine.launcher import Launcher
from shared.scheduling.grammar_queue import GrammarQueue


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


def new_grammar_queue(engine: Engine, options: ScheduleOptions, wake: Callable[[], None]) -> GrammarQueue:
    """Where requests wait until their grammars are compiled; `wake` is called by any thread when one is."""
    return GrammarQueue(
        engine.grammars,
        options.grammar_compile_timeout_s,
        engine.clock,
        wake,
        jump_forward=options.enable_jump_forward,
        cpu_clock=engine.cpu_clock,
    )
