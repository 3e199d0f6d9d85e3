"""One node: the real scheduler of its role over a real ledger, with a simulated runner and transport below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from decode_node.scheduler import DecodeScheduler
from planner.cost_model import CostModel
from planner.simulator.events import EventLoop, NodeClock
from planner.simulator.runner import EOS, VOCAB_SIZE, SimStream, TokenOf
from planner.simulator.transport import SimSides, Transport
from prefill_node.scheduler import PrefillScheduler
from router.dispatch.node import Node
from shared.config import CacheOptions, ModelOptions, NetOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, make_ledger
from shared.engine.loop_parts import NodeParts
from shared.engine.profiler import Profiler
from shared.engine.progress import Progress
from shared.engine.vitals import Vitals
from shared.kvcache.allocator import HostPages
from shared.model.config import ModelConfig, load_model_config
from shared.model.files import BUILTIN_MODEL, resolve_model
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    KVLayout,
    Load,
    NodeHello,
    NodeLimits,
    NodeRef,
    Role,
    RouterHello,
    RouterToNode,
)
from shared.protocol.router_port import RouterPort

ROUTER = "router"
PONG_S = 1.0
OnMessage = Callable[["SimNode", Any], None]


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """What a simulated node is made of. Tokens are those of the scaled trace."""

    pool_tokens: int = 32_768
    page_size: int = 32
    context_length: int = 8_192
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    disable_radix_cache: bool = False
    host_kv_tokens: int = 0
    kv_bytes_per_token: int = 16_384
    """Of the network model: the built-in model in bfloat16 has 8 layers x K and V x 4 heads x 32."""
    poll_s: float = 0.05
    """How often a node that waits for time to pass looks again; IDLE_WAIT_S of a node process."""


class SimVitals(Vitals):
    """A simulated node is not audited when it is idle."""

    def _audit(self) -> None:
        pass


class _Wake:
    """The `threading.Event` of a node: setting it schedules a step."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.set = wake


class _Outbox:
    """Everything that a node says to the router."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def send(self, to: str, message: Any) -> None:
        self._node.say(message)


class SimNode(Node):
    """Stands for a node on both ends: it runs the scheduler, and the dispatcher sees it as its `Node`."""

    stream_type: type[SimStream] = SimStream
    vitals_type: type[SimVitals] = SimVitals

    def __init__(
        self,
        name: str,
        role: Role,
        shape: NodeShape,
        costs: CostModel,
        loop: EventLoop,
        transport: Transport,
        token_of: TokenOf,
        on_message: OnMessage,
    ) -> None:
        self.clock = NodeClock(loop)
        self._loop = loop
        self._transport = transport
        self._ping_at = loop.now
        self._pong = Load()
        self._on_message = on_message
        self._poll_s = shape.poll_s
        self._next_step_at: float | None = None
        wake = _Wake(self.wake)
        config = _config(shape)
        self.stream = self.stream_type(self.clock, costs, token_of)
        engine = sim_engine(config, self.stream, self.clock, shape.page_size * shape.kv_bytes_per_token)
        ref, layout = NodeRef(name, name, "sim"), engine.layout
        hello = NodeHello(ref, role, layout, engine.limits, {}, PROTOCOL_VERSION, is_exact=True)
        super().__init__(hello)
        self.kv_nbytes_per_token = shape.kv_bytes_per_token
        self.ledger = engine.ledger
        self.vitals = self.vitals_type(self.ledger, engine.progress, self.clock)
        self._port = RouterPort(_Outbox(self), hello, self.vitals.load, wake, self.clock)  # type: ignore[arg-type]
        self.sides = SimSides(self.ref, engine.layout, transport, self.clock, self.wake)
        parts = NodeParts(
            config=config,
            engine=engine,
            transfer=self.sides,  # type: ignore[arg-type]
            router_port=self._port,
            vitals=self.vitals,
            wake=wake,  # type: ignore[arg-type]
        )
        self.scheduler: Any = (PrefillScheduler if role is Role.PREFILL else DecodeScheduler)(parts)
        self.send(RouterHello(ROUTER, PROTOCOL_VERSION))

    # ------------------------------------------------------------------------------------- the thread
    def wake(self) -> None:
        """There is something to hear: step as soon as the scheduler thread is free."""
        self._step_at(max(self._loop.now, self.clock.free_at))

    def _step_at(self, time: float) -> None:
        if self._next_step_at is None or time < self._next_step_at:
            self._next_step_at = time
            self._loop.at(time, self._step, time)

    def _step(self, planned: float) -> None:
        if planned == self._next_step_at:
            self._next_step_at = None
            self.step()

    def step(self) -> None:
        """Take a turn of the scheduler, and plan the next one."""
        self._answer_ping()
        self.clock.in_step = True
        worked = self.scheduler.step()
        now = self.clock()
        self.clock.in_step = False
        if worked:
            self._step_at(now)
        elif self.scheduler.reqs or len(self.scheduler.lending):
            self._step_at(now + self._poll_s)

    # ------------------------------------------------------------------------------------- the router
    @property
    def load(self) -> Load:
        """What its latest Pong said; routers ping every `PONG_S`."""
        self._answer_ping()
        return self._pong

    def _answer_ping(self) -> None:
        """Answer the ping that is due. The load changes in steps alone, so that each of them calls this before."""
        if self._loop.now >= self._ping_at:
            self._ping_at += PONG_S * (1 + (self._loop.now - self._ping_at) // PONG_S)
            self._pong = self.vitals.load()

    def send(self, message: RouterToNode) -> None:
        """Queue a message of the router."""
        self._transport.deliver(self._loop.now, ROUTER, self.ref.node_id, self.hear, message)

    def say(self, message: Any) -> None:
        """Tell the router something."""
        self._transport.deliver(self.clock(), self.ref.node_id, ROUTER, self._on_message, self, message)

    def hear(self, message: RouterToNode) -> None:
        """A message of the router is there."""
        self._port.on_message(ROUTER, message)


def _config(shape: NodeShape) -> NodeConfig:
    cache = CacheOptions(
        page_size=shape.page_size,
        max_total_tokens=shape.pool_tokens,
        disable_radix_cache=shape.disable_radix_cache,
        host_kv_tokens=shape.host_kv_tokens,
    )
    model = ModelOptions(context_length=shape.context_length)
    net = NetOptions(router_timeout_s=float("inf"))
    return NodeConfig(model=model, cache=cache, schedule=shape.schedule, net=net)


def sim_engine(config: NodeConfig, stream: SimStream, clock: NodeClock, page_nbytes: int) -> Engine:
    """An Engine over `stream`, under the clock of one simulated node. `config` has the tokens of its pool.

    `page_nbytes` is what a page of KV takes, by which `--retract-policy auto` weighs a copy against a prefill.
    """
    cache, num_rows = config.cache, config.schedule.max_running_requests
    assert cache.max_total_tokens is not None and config.model.context_length is not None
    num_pages = cache.max_total_tokens // cache.page_size + 1
    host = HostPages((cache.host_kv_tokens or 0) // cache.page_size, page_nbytes)
    context_length = config.model.context_length
    return Engine(
        model_config=_model_config(),
        pool=None,  # type: ignore[arg-type]  # what reads and writes pages is simulated
        ledger=make_ledger(num_pages, cache, num_rows, context_length, host),
        stream=stream,  # type: ignore[arg-type]
        layout=KVLayout("simulated", "int64", cache.page_size, 1, 1, 1),
        limits=NodeLimits(context_length, (num_pages - 1) * cache.page_size, num_rows),
        progress=Progress(),
        attention_backend="simulated",
        is_exact=True,
        eos_token_ids=frozenset({EOS}),
        profiler=Profiler(config.profile_dir, "simulated"),
        cpu_cores=CpuCores(1),
        snapshot=lambda batch, *_: batch,
        clock=clock,
        stamp_clock=clock,
    )


@cache
def _model_config() -> ModelConfig:
    """What the schedulers look at is the vocabulary; the rest is that of the built-in model."""
    builtin = load_model_config(resolve_model(BUILTIN_MODEL, with_weights=False))
    return replace(builtin, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
