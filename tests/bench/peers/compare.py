"""Engines in turn, in one run: load all, then round by round and workload by workload ask each the same."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.model.config import load_model_config
from tests.bench.limits import StreamingRead
from tests.bench.machine import usable_cores
from tests.bench.models import SHAPES, quantized_model, random_model
from tests.bench.peers.catalog import BATONS, PEERS, installed
from tests.bench.peers.engines import BatonEngine, Engine, EngineError, Memory, PeerEngine
from tests.bench.peers.rounds import Rounds, engine_row, workload_rows
from tests.bench.peers.workloads import WARM_UP, Workload
from tests.venvs import InstallError

ENGINES = (*BATONS, *PEERS)
WEIGHTS = ("bf16", "int8", "int4")
KV_TOKENS = 16_384
"""KV pool of each engine that has one: enough for every workload at once."""
PASSES = 5


@dataclass
class Contender:
    """A loaded engine, and what it has done."""

    engine: Engine
    load_s: float
    loaded: Memory
    rounds: dict[Workload, Rounds] = field(default_factory=lambda: defaultdict(Rounds))


def compare(
    model: str,
    workloads: Sequence[Workload],
    engines: Sequence[str],
    num_rounds: int,
    folder: Path,
    *,
    weights: str = "bf16",
) -> Iterator[dict[str, Any]]:
    """Measure one model; rows when all rounds are over. Logs are in `folder`.

    An engine that cannot be installed, does not start or breaks is left out, and has a row with the reason.
    """
    read, config = StreamingRead(usable_cores()), load_model_config(_checkpoint(model, weights))
    with ExitStack() as stack:
        ready: dict[str, Engine] = {}
        contenders: dict[str, Contender] = {}
        reasons: dict[str, str] = {}
        for name in engines:  # all before one is loaded: to convert a model takes several times its size
            try:
                ready[name] = _engine(name, model, weights, folder)
            except InstallError as error:
                reasons[name] = _left_out(name, error)
        for name, engine in ready.items():
            try:
                contenders[name] = _load(stack, engine, config.vocab_size)
            except EngineError as error:
                reasons[name] = _left_out(name, error)
        for round_ in range(num_rounds):
            for workload in workloads:
                for name in _turns(list(contenders), round_):
                    try:
                        _measure(contenders[name], workload, round_, read, config.vocab_size)
                    except EngineError as error:
                        reasons[name] = _left_out(name, error)
                        del contenders[name]
        for workload in workloads:
            rounds = {name: contender.rounds[workload] for name, contender in contenders.items()}
            yield from workload_rows(model, config, workload, rounds)
        for c in contenders.values():
            yield engine_row(model, config, c.engine, c.load_s, c.loaded, KV_TOKENS)
        for name, reason in reasons.items():
            yield {"bench": "peers_left_out", "model": model, "engine": name, "reason": reason}


def _checkpoint(model: str, weights: str) -> Path:
    """What Baton and vLLM read."""
    is_shipped = weights in ("bf16", SHAPES[model].shipped)
    return random_model(model) if is_shipped else quantized_model(model, weights)


def _engine(name: str, shape: str, weights: str, folder: Path) -> Engine:
    """Installed, and with a model that it can read. Raises InstallError."""
    model = _checkpoint(shape, weights)
    if name in BATONS:
        return BatonEngine(BATONS[name], model, KV_TOKENS, folder)
    peer = installed(name)
    if peer.peer.formats:
        model = peer.converted(random_model(shape), weights)
    command = peer.command(model, len(usable_cores()), KV_TOKENS, weights)
    return PeerEngine(name, command, peer.environment(), folder / f"{name}.log")


def _load(stack: ExitStack, engine: Engine, vocab_size: int) -> Contender:
    start = time.perf_counter()
    stack.enter_context(engine)
    load_s = time.perf_counter() - start
    for workload in WARM_UP:
        engine.ask(workload.prompts(0, vocab_size), workload.output_tokens)
    engine.pause()
    _tell(f"{engine.name} has loaded its model in {load_s:.1f} s")
    return Contender(engine, load_s, engine.memory())


def _turns(names: list[str], round_: int) -> list[str]:
    """Each round another one is first."""
    start = round_ % len(names) if names else 0
    return names[start:] + names[:start]


def _measure(
    contender: Contender, workload: Workload, round_: int, read: StreamingRead, vocab_size: int
) -> None:
    rounds = contender.rounds[workload]
    read_gb_s = max(read.gb_s() for _ in range(PASSES))
    answers = contender.engine.ask(workload.prompts(round_, vocab_size), workload.output_tokens)
    contender.engine.pause()
    rounds.answers.append(answers)
    rounds.read_gb_s.append(read_gb_s)
    _tell(f"round {round_ + 1}, {workload.name}, {contender.engine.name}: {answers.seconds:.2f} s")


def _left_out(name: str, error: Exception) -> str:
    """Say why in full, and return the first sentence of the first error in it, or else its last line."""
    _tell(f"{name} is left out: {error}")
    lines = str(error).splitlines()
    line = next((line for line in lines if "Error: " in line), f"Error: {lines[-1]}")
    return line.partition("Error: ")[2].partition(". ")[0]


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
