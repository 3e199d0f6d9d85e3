"""A dispatcher over nodes whose messages, limits, pongs and caches a test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from router.dispatch.dispatcher import Deadlines, Dispatcher
from router.dispatch.estimate import RequestEstimates
from router.dispatch.fleet_view import FleetView
from router.dispatch.metrics import Metrics
from router.dispatch.node import PrefixIndex
from router.dispatch.policy import RoutingPolicy, cache_aware, round_robin
from router.dispatch.running_req import RunningReq
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    CacheEvents,
    Load,
    NodeLimits,
    NodeRef,
    Role,
    RouterToNode,
    Work,
)
from shared.protocol.sampling_params import SamplingParams

PAGE = 16
VOCAB_SIZE = 1000
IDS = tuple(range(100, 100 + 5 * PAGE))


class FakeNode:
    """A node as the dispatcher sees it."""

    def __init__(self, name: str, role: Role) -> None:
        self.ref = NodeRef(name, f"{name}#1", "nowhere")
        self.role = role
        self.limits = NodeLimits(65_536, 65_536, 64)
        self.load = Load()
        self.page_size = PAGE
        self.kv_nbytes_per_token = 1024
        self.numerics = "native"
        self.is_exact = True
        self.version = PROTOCOL_VERSION
        self.prefixes = PrefixIndex()
        self.sent: list[RouterToNode] = []

    def send(self, message: RouterToNode) -> None:
        self.sent.append(message)

    def holds(self, num_pages: int, ids: Sequence[int] = IDS) -> None:
        blocks = tuple(block_hashes(ids[: num_pages * PAGE], PAGE))
        self.prefixes.apply(CacheEvents(0, blocks, (), reset=True))


class Fleet:
    """A prefill node, some decode nodes, and a dispatcher of its own."""

    def __init__(
        self,
        num_decode: int,
        local_prefill_tokens: int | None = PAGE,
        *,
        num_prefill: int = 1,
        prefill: RoutingPolicy = round_robin,
        decode: RoutingPolicy = cache_aware,
        incarnation: str = "router",
        ttft_limit_s: float | None = None,
    ) -> None:
        self.decodes = [FakeNode(f"d{i:03}", Role.DECODE) for i in range(num_decode)]
        self.prefills = [FakeNode(f"p{i}", Role.PREFILL) for i in range(num_prefill)]
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.metrics = Metrics(lambda: "tiny")
        self.dispatcher = Dispatcher(
            self,
            incarnation=incarnation,
            policies={Role.PREFILL: prefill, Role.DECODE: decode},
            deadlines=Deadlines(first_token_s=60, stall_s=60, failover_s=30),
            local_prefill_tokens=local_prefill_tokens,
            ttft_limit_s=ttft_limit_s,
            metrics=self.metrics,
            vocab_size=lambda: VOCAB_SIZE,
            later=lambda delay_s, act: self.timers.append((self.now + delay_s, act)),
            clock=lambda: self.now,
        )

    @property
    def view(self) -> FleetView:
        return self.dispatcher._view

    def estimates(self, work: Work) -> RequestEstimates:
        return RequestEstimates(work, self.view, Random(0))

    def wait(self, seconds: float) -> None:
        """Let time pass, and everything happen that was to happen in it."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
        self.now = until

    def live(self, role: Role) -> Sequence[FakeNode]:
        return self.decodes if role is Role.DECODE else self.prefills

    def why_none(self, role: Role) -> str:
        return "gone"

    def start(self, ids: tuple[int, ...] = IDS, **params: object) -> RunningReq:
        sampling = SamplingParams(**{"max_new_tokens": 8, **params})  # type: ignore[arg-type]
        return self.dispatcher.start(Work(ids, sampling), lambda: None, in_time=True)

    def burst(self, count: int) -> Counter[str]:
        """Requests of one prompt, none of which ends, by the decode node that got them."""
        return Counter(self.start().nodes[-1].ref.node_id for _ in range(count))
