"""The simulator decides as a real node does: what that heard, and when its forwards ended, gives the same Plans.

A prefill node and a decode node with a real model and the real transfer are recorded: what each turn heard of the
router and of transfers, its Plan, and when its forwards and copies ended. Then a scheduler over the simulator's
engine hears the same, turn by turn. It has no model: its tokens are those that were recorded.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from decode_node.scheduler import DecodeScheduler
from planner.cost_model import CostModel
from planner.simulator.events import EventLoop, NodeClock
from planner.simulator.node import SimVitals, sim_engine
from planner.simulator.runner import SimCopyResult, SimStream
from prefill_node.scheduler import PrefillScheduler
from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import build_engine
from shared.engine.forward_stream import CopyResult
from shared.engine.loop_parts import NodeParts
from shared.kvcache.allocator import PageCopy
from shared.kvtransfer.sides import TransferSides
from shared.protocol.messages import PROTOCOL_VERSION, NodeHello, NodeRef, ReqKey, Role
from shared.protocol.router_port import FromRouter, RouterPort
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan, ScheduleBatch
from tests.cluster import Cluster, Node
from tests.modelzoo import make_model
from tests.plan_records import PlanRecord, record_of

VOCAB = range(10, 200)
NUM_REQS = 24
PAGE = 8


@dataclass
class Turn:
    """One turn of a node: what it heard, and what it decided on."""

    at: float
    messages: list[FromRouter] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    plan: PlanRecord | None = None


@dataclass
class Recording:
    """All turns of one node; in launch order, the ends of its forwards and the seconds of its copies."""

    role: Role
    config: NodeConfig
    page_nbytes: int
    turns: list[Turn] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    """(rid, output position) -> what was sampled there."""


def tap(owner: object, name: str, heard: Callable[[Any], object]) -> None:
    """Have `heard` see all that the method `name` returns."""
    method = getattr(owner, name)

    def tapped() -> Any:
        result = method()
        heard(result)
        return result

    setattr(owner, name, tapped)


def tap_plans(
    launcher: Any, before: Callable[[Plan], object], after: Callable[[Outcome, int], object]
) -> None:
    """Have `before` see each Plan, and `after` its Outcome and how many forwards ended in that turn."""
    turn = launcher.turn

    def tapped(plan: Plan) -> Outcome:
        before(plan)
        due = launcher.in_flight is not None
        outcome: Outcome = turn(plan)
        after(outcome, due + (plan.batch is not None and launcher.in_flight is None))
        return outcome

    launcher.turn = tapped


class TimedCopy:
    """A copy, said to have taken as long as a test wants: a real one takes what the machine's other work lets it."""

    def __init__(self, copy: CopyResult, seconds: float) -> None:
        self._copy, self._seconds = copy, seconds

    def wait(self) -> float:
        self._copy.wait()
        return self._seconds


def record(node: Node, config: NodeConfig, seconds_of_copies: Iterator[float]) -> Recording:
    """Record `node` from now on."""
    engine = node.engine
    of, clock = Recording(node.role, config, engine.ledger.host.page_nbytes), engine.clock
    copy = engine.stream.copy
    engine.stream.copy = lambda pages: TimedCopy(copy(pages), next(seconds_of_copies))  # type: ignore[method-assign]

    def ended(outcome: Outcome, num_forwards: int) -> None:
        of.ends += [clock()] * num_forwards
        of.copies_s += [seconds for _, seconds in outcome.copied]
        for req in outcome.sampled:
            of.tokens[req.key.rid, req.output_len - 1] = req.ids[-1]

    tap(node.router_port, "take", lambda heard: of.turns.append(Turn(clock(), messages=list(heard))))
    tap(node.receiver, "poll", lambda heard: of.turns[-1].received.extend(heard))
    tap(node.sender, "poll", lambda heard: of.turns[-1].sent.extend(heard))
    tap_plans(node.scheduler._launcher, lambda plan: setattr(of.turns[-1], "plan", record_of(plan)), ended)
    return of


# --------------------------------------------------------------------------------------------- the replay
class RecordedStream(SimStream):
    """Forwards end when they ended, and copies take what they took."""

    def __init__(self, clock: NodeClock, of: Recording) -> None:
        nothing = CostModel(a=0, b=0, c=0, d=0, e=0, f=0)
        super().__init__(clock, nothing, lambda rid, position: of.tokens.get((rid, position), VOCAB[0]))
        self._ends, self._copies_s = deque(of.ends), deque(of.copies_s)

    def _seconds(self, batch: ScheduleBatch) -> float:
        return self._ends.popleft() - max(self._free_at, self._clock())

    def copy(self, pages: PageCopy) -> SimCopyResult:
        return SimCopyResult(self._clock, self._clock(), self._copies_s.popleft())


class DecidesOtherwise(Exception):
    """The plan of a turn is another one than was recorded."""


class HeardSide:
    """Both ends of a transfer: it says what was heard, and what it is told goes nowhere."""

    link_reports = ()

    def __init__(self) -> None:
        self.unreachable: dict[str, str] = {}
        self.heard: Sequence[Any] = ()

    def poll(self) -> list[Any]:
        return list(self.heard)

    def tick(self) -> None:
        pass

    def open(self, *args: Any) -> None:
        pass

    offer = handoff = cancel = open


class HeardPort(RouterPort):
    """What came from routers."""

    heard: Sequence[FromRouter] = ()

    def take(self) -> list[FromRouter]:
        return list(self.heard)


class Nowhere:
    """An outbox, and a peering."""

    unreachable: dict[str, str] = {}  # noqa: RUF012

    def send(self, *args: Any) -> None:
        pass

    set_peers = ensure = send


def replay(of: Recording) -> int | None:
    """The first turn in which a scheduler over the simulator's engine decides otherwise; None if none does."""
    config = of.config
    loop = EventLoop()
    clock = NodeClock(loop)
    engine = sim_engine(config, RecordedStream(clock, of), clock, of.page_nbytes)
    vitals = SimVitals(engine.ledger, engine.progress, clock)
    hello = NodeHello(NodeRef("n", "n", "sim"), of.role, engine.layout, engine.limits, {}, PROTOCOL_VERSION)
    port = HeardPort(Nowhere(), hello, vitals.load, None, clock)  # type: ignore[arg-type]
    receiver, sender = HeardSide(), HeardSide()
    parts = NodeParts(
        config=replace(config, net=replace(config.net, router_timeout_s=float("inf"))),
        engine=engine,
        transfer=TransferSides(sender, Nowhere(), receiver),  # type: ignore[arg-type]
        router_port=port,
        vitals=vitals,
        wake=threading.Event(),
    )
    scheduler: Any = (PrefillScheduler if of.role is Role.PREFILL else DecodeScheduler)(parts)

    def compare(plan: Plan) -> None:
        if record_of(plan) != turn.plan:
            raise DecidesOtherwise

    tap_plans(scheduler._launcher, compare, lambda outcome, num_forwards: None)
    for n, turn in enumerate(of.turns):
        port.heard, receiver.heard, sender.heard = turn.messages, turn.received, turn.sent
        loop.now, clock.in_step = turn.at, True
        try:
            scheduler.step()
        except DecidesOtherwise:
            return n
        clock.in_step = False
    return None


# ------------------------------------------------------------------------------------------------ the load
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


def node_config(model: Path, *, pool_tokens: int, host_kv_tokens: int = 0, **schedule: Any) -> NodeConfig:
    return NodeConfig(
        model=ModelOptions(
            model=str(model), dtype="float32", device="cpu", cpu_cores=CpuCores(1), context_length=256
        ),
        cache=CacheOptions(page_size=PAGE, max_total_tokens=pool_tokens, host_kv_tokens=host_kv_tokens),
        schedule=ScheduleOptions(
            chunked_prefill_size=16,
            schedule_conservativeness=0.0,
            num_reserved_decode_tokens=0,
            in_batch_prefix_caching_deprioritize_threshold=8,
            max_running_requests=12,
            **schedule,
        ),
    )


def run(model: Path, **schedule: Any) -> tuple[Recording, Recording]:
    """A prefill node and a decode node that is too small for what runs on it, some of which it prefills by itself."""
    host_kv_tokens, copies_s = schedule.pop("host_kv_tokens", 0), schedule.pop("copies_s", (1e-4,))
    prefill = node_config(model, pool_tokens=512, **{**schedule, "retract_policy": "auto"})
    decode = node_config(model, pool_tokens=320, host_kv_tokens=host_kv_tokens, **schedule)
    rng = random.Random(3)
    beginnings = [[rng.choice(VOCAB) for _ in range(40)] for _ in range(3)]
    params = SamplingParams(
        max_new_tokens=40, temperature=0.9, seed=5, ignore_eos=True, stop_token_ids=tuple(range(8))
    )
    keys: list[ReqKey] = []
    with Cluster(
        1, 1, lambda config: build_engine(config, lambda what, fraction: None), prefill, decode_config=decode
    ) as cluster:
        nodes = cluster.nodes["p0"], cluster.nodes["d0"]
        seconds = itertools.cycle(copies_s)
        recordings = record(nodes[0], prefill, seconds), record(nodes[1], decode, seconds)
        while len(keys) < NUM_REQS or not all(cluster.router.answers[key].ended for key in keys):
            if len(keys) < NUM_REQS and rng.random() < 0.6:
                ids = rng.choice(beginnings)[: rng.randrange(41)] + rng.choices(VOCAB, k=rng.randint(1, 30))
                source = None if rng.random() < 0.3 else "p0"
                keys.append(cluster.router.submit(f"r{len(keys)}", ids, params, source, "d0"))
            cluster.step(rng.uniform(0.0005, 0.01), check=False)
        assert not any(cluster.router.answers[key].failures for key in keys)
    for recording in recordings:
        recording.turns.pop()  # to which closing has added
    return recordings


CASES = {
    "overlap": {},
    "serial, mixed chunks, longest prefix": {
        "disable_overlap_schedule": True,
        "enable_mixed_chunk": True,
        "schedule_policy": "lpm",
    },
    "host": {"retract_policy": "host", "host_kv_tokens": 160},
    "auto": {"retract_policy": "auto", "host_kv_tokens": 320, "retract_every": 7},
    "auto, copies slow at times": {
        "retract_policy": "auto",
        "host_kv_tokens": 320,
        "retract_every": 7,
        "copies_s": (1e-4, 1e-4, 3e-2, 1e-3, 2e-1),
    },
}


@pytest.fixture(scope="module")
def recorded(model: Path) -> dict[str, tuple[Recording, Recording]]:
    return {name: run(model, **schedule) for name, schedule in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_a_node_heard_gives_the_same_plans(
    recorded: dict[str, tuple[Recording, Recording]], name: str
) -> None:
    for recording in recorded[name]:
        assert replay(recording) is None


def test_the_load_has_chunks_and_retraction(recorded: dict[str, tuple[Recording, Recording]]) -> None:
    for name, (prefill, decode) in recorded.items():
        plans = [turn.plan for of in (prefill, decode) for turn in of.turns if turn.plan is not None]
        chunks = [item for plan in plans for item in plan.extends if item.start and item.position is None]
        assert chunks, f"{name}: no prompt takes several chunks"
        retracted = [item for plan in plans for item in plan.extends if item.position]
        copies = [copy for plan in plans for copy in plan.copies]
        assert retracted or copies, f"{name}: nothing is retracted"
        assert bool(copies) == ("host_kv_tokens" in CASES[name])
        assert retracted or "copies_s" not in CASES[name], f"{name}: nothing is prefilled again"
