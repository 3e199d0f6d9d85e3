"""A router and its nodes under one virtual clock: the real dispatcher and routing policy over simulated nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from planner.cost_model import CostModel
from planner.figures import Served
from planner.profile import RouterCost
from planner.simulator.events import EventLoop
from planner.simulator.node import NodeShape, SimNode
from planner.simulator.runner import VOCAB_SIZE, token_at
from planner.simulator.transport import NetworkModel, Transport
from planner.traffic.trace import SimRequest
from router.config import DispatchOptions
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import Metrics
from router.dispatch.running_req import Aborted, RunningReq
from router.dispatch.stages import Start
from shared.errors import RequestError
from shared.protocol.messages import Finish, Role, Tokens, Work
from shared.protocol.sampling_params import SamplingParams
from shared.timeline import ReqStage


@dataclass(slots=True)
class Outcome:
    """What the client of one request saw. Times are seconds of the virtual clock."""

    rid: str
    request: SimRequest
    started_at: float
    req: RunningReq | None
    """None once it has ended."""
    num_tokens: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    finish: Finish | Aborted | None = None
    error: RequestError | None = None
    start: Start | None = None
    """Where the time to the second token went; None unless the nodes have reported every stage."""
    cached_tokens: int = 0
    """Of its prompt."""
    retracted_s: float = 0.0
    """How long it was without its KV between two tokens."""

    @property
    def ok(self) -> bool:
        """It has had every token of its output."""
        return self.finish is not None and self.num_tokens == self.request.output_len

    @property
    def served(self) -> Served:
        """What its client saw of it, if it is ok."""
        assert self.first_token_at is not None and self.ended_at is not None
        sent_at = self.request.at_s
        return Served(
            ttft_s=self.first_token_at - sent_at, e2e_s=self.ended_at - sent_at, num_tokens=self.num_tokens
        )


class _QuietMetrics(Metrics):
    """No histograms: the simulation keeps what it needs itself."""

    def started(self) -> None:
        pass

    def first_tokens(self, num_new: int, ttft_s: float) -> None:
        pass

    def later_tokens(self, gaps: Mapping[float, int]) -> None:
        pass

    def ended(self, req: RunningReq) -> None:
        pass


class _Nodes:
    """The dispatcher's Fleet: the nodes to which it sends new requests."""

    def __init__(self) -> None:
        self.of: dict[Role, list[SimNode]] = {Role.PREFILL: [], Role.DECODE: []}

    def live(self, role: Role) -> Sequence[SimNode]:
        return self.of[role]

    def why_none(self, role: Role) -> str:
        return f"every {role} node is gone"


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """How many nodes of what. The decode nodes may differ from the prefill nodes."""

    num_prefill: int = 1
    num_decode: int = 1
    prefill: NodeShape = field(default_factory=NodeShape)
    decode: NodeShape = field(default_factory=NodeShape)
    network: NetworkModel = field(default_factory=NetworkModel)
    local_prefill_tokens: int | None = 0
    prefill_policy: str = "round-robin"
    decode_policy: str = "cache-aware"
    ttft_limit_s: float | None = None
    router: RouterCost = field(default_factory=lambda: RouterCost(request_s=0.0, token_s=0.0))


class SimFleet:
    """Send requests, let virtual time pass, look at `outcomes`."""

    node_type: type[SimNode] = SimNode
    transport_type: type[Transport] = Transport

    def __init__(self, shape: FleetShape, costs: CostModel) -> None:
        self.loop = EventLoop()
        page_nbytes = shape.prefill.page_size * shape.prefill.kv_bytes_per_token
        self.transport = self.transport_type(self.loop, shape.network, page_nbytes)
        self.outcomes: dict[str, Outcome] = {}
        self.nodes: dict[str, SimNode] = {}
        self._shape = shape
        self._costs = costs
        self.live = _Nodes()
        self._router_free_at = 0.0
        self.router_busy_s = 0.0
        self.dispatcher = Dispatcher(
            self.live,
            incarnation="router",
            options=DispatchOptions(
                prefill_policy=shape.prefill_policy,
                decode_policy=shape.decode_policy,
                local_prefill_tokens=shape.local_prefill_tokens,
                ttft_limit_s=shape.ttft_limit_s,
                queue_timeout_s=1e9,
                stall_timeout_s=1e9,
            ),
            metrics=_QuietMetrics(lambda: "sim"),
            vocab_size=lambda: VOCAB_SIZE,
            later=lambda delay, act: self.loop.at(self.loop.now + delay, act),
            clock=self.loop,
        )
        for i in range(shape.num_prefill):
            self.start(f"p{i:04d}", Role.PREFILL)
        for i in range(shape.num_decode):
            self.start(f"d{i:04d}", Role.DECODE)

    # ------------------------------------------------------------------------------------------ nodes
    def start(self, name: str, role: Role) -> SimNode:
        """A new node joins."""
        shape = self._shape.prefill if role is Role.PREFILL else self._shape.decode
        node = self.node_type(
            name, role, shape, self._costs, self.loop, self.transport, self._token, self._on_message
        )
        self.nodes[name] = node
        self.live.of[role].append(node)
        return node

    # --------------------------------------------------------------------------------------- requests
    def submit(self, requests: Iterable[SimRequest]) -> None:
        """Send each at its time."""
        router = self._shape.router
        for request in requests:
            seconds = router.request_s + router.prompt_token_s * request.input_len
            self.loop.at(request.at_s, self._in_turn, seconds, self.send, request)

    def _in_turn(self, seconds: float, run: Callable[..., object], *args: Any) -> None:
        """Run `run(*args)` on the router's one thread, which that takes `seconds`, behind all that came before."""
        if not seconds and self._router_free_at <= self.loop.now:
            run(*args)
            return
        self.router_busy_s += seconds
        self._router_free_at = max(self._router_free_at, self.loop.now) + seconds
        self.loop.at(self._router_free_at, run, *args)

    def send(self, request: SimRequest) -> Outcome | None:
        """Dispatch one request now; None when no node can take it."""
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens or 2 * request.output_len, temperature=0.0
        )
        work = Work(request.input_ids(), params, priority=request.priority, routing_key=request.routing_key)
        try:
            req = self.dispatcher.start(work, lambda: self._take(outcome), in_time=True)
        except RequestError:
            return None
        self.outcomes[req.key.rid] = outcome = Outcome(req.key.rid, request, self.loop.now, req)
        return outcome

    def _take(self, outcome: Outcome) -> None:
        req, length = outcome.req, outcome.request.output_len
        assert req is not None, f"{outcome.rid}: something came after the end"
        for token in req.take():
            wanted = token_at(outcome.rid, outcome.num_tokens, length)
            assert token == wanted, f"{outcome.rid}: {token} at position {outcome.num_tokens}, not {wanted}"
            outcome.num_tokens += 1
        if req.ended:
            outcome.first_token_at, outcome.ended_at = req.first_token_at, req.ended_at
            outcome.finish, outcome.error, outcome.req = req.finish, req.error, None
            outcome.start, outcome.cached_tokens = req.start, req.cached_tokens
            outcome.retracted_s = sum(
                left.time - entered.time
                for entered, left in pairwise(req.stamps)
                if entered.stage == ReqStage.RETRACTED
            )

    def _token(self, rid: str, position: int) -> int:
        return token_at(rid, position, self.outcomes[rid].request.output_len)

    def _on_message(self, node: SimNode, message: Any) -> None:
        num_tokens = sum(len(e.token_ids) for e in message.entries) if isinstance(message, Tokens) else 0
        self._in_turn(num_tokens * self._shape.router.token_s, self.dispatcher.hear, node, message)

    def run(self, until: float = float("inf")) -> None:
        """Until every request has ended and nothing moves any more, or `until`."""
        self.loop.run(until)
