"""A dispatcher over nodes whose messages, limits, pongs and caches a test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.config import DispatchOptions
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.estimate import RequestEstimates
from router.dispatch.fleet_view import FleetView
from router.dispatch.metrics import Metrics
from router.dispatch.node import Loss, Node, PrefixIndex
from router.dispatch.running_req import RunningReq
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    CacheEvents,
    Failed,
    Load,
    NodeLimits,
    NodeRef,
    Role,
    RouterToNode,
    TokenEntry,
    Work,
)
from shared.protocol.sampling_params import SamplingParams

PAGE = 16
VOCAB_SIZE = 1000
IDS = tuple(range(100, 100 + 5 * PAGE))

M = TypeVar("M")


class SeenNode:
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

    def last(self, kind: type[M]) -> M:
        """The latest message of a kind that was sent to the node."""
        return [message for message in self.sent if isinstance(message, kind)][-1]

    def holds(self, num_pages: int, ids: Sequence[int] = IDS) -> None:
        blocks = tuple(block_hashes(ids[: num_pages * PAGE], PAGE))
        self.prefixes.apply(CacheEvents(0, blocks, (), reset=True))


class SeenFleet:
    """A prefill node, some decode nodes, as a dispatcher of their own sees them."""

    def __init__(
        self,
        num_decode: int,
        local_prefill_tokens: int | None = PAGE,
        *,
        num_prefill: int = 1,
        prefill: str = "round-robin",
        decode: str = "cache-aware",
        incarnation: str = "router",
        ttft_limit_s: float | None = None,
    ) -> None:
        self.decodes = [SeenNode(f"d{i:03}", Role.DECODE) for i in range(num_decode)]
        self.prefills = [SeenNode(f"p{i}", Role.PREFILL) for i in range(num_prefill)]
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.metrics = Metrics(lambda: "tiny")
        self.dispatcher = Dispatcher(
            self,
            incarnation=incarnation,
            options=DispatchOptions(
                prefill_policy=prefill,
                decode_policy=decode,
                local_prefill_tokens=local_prefill_tokens,
                ttft_limit_s=ttft_limit_s,
                queue_timeout_s=60.0,
                stall_timeout_s=60.0,
                failover_timeout_s=30.0,
            ),
            metrics=self.metrics,
            vocab_size=lambda: VOCAB_SIZE,
            later=lambda delay_s, act: self.timers.append((self.now + delay_s, act)),
            clock=lambda: self.now,
        )

    @property
    def nodes(self) -> list[SeenNode]:
        """All of them, those that prefill first."""
        return [*self.prefills, *self.decodes]

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

    def live(self, role: Role) -> Sequence[SeenNode]:
        return self.decodes if role is Role.DECODE else self.prefills

    def why_none(self, role: Role) -> str:
        return "gone"

    def start(self, ids: tuple[int, ...] = IDS, **params: object) -> RunningReq:
        sampling = SamplingParams(**{"max_new_tokens": 8, **params})  # type: ignore[arg-type]
        return self.dispatcher.start(Work(ids, sampling), lambda: None, in_time=True)

    def burst(self, count: int) -> Counter[str]:
        """Requests of one prompt, none of which ends, by the decode node that got them."""
        return Counter(self.start().nodes[-1].ref.node_id for _ in range(count))

    def start_on(self, node: Node, **params: object) -> RunningReq:
        """A request that is sent to `node`, after some that may be sent to others."""
        return next(req for req in (self.start(**params) for _ in range(20)) if node in req.nodes)  # type: ignore[arg-type]

    def tell(
        self, req: RunningReq, *ids: int, by: Node | None = None, at: int | None = None, **fields: Any
    ) -> None:
        """Tokens of a request from its last node, behind those that have come, unless it is said otherwise."""
        position = len(req.output_ids) if at is None else at
        entry = TokenEntry(fields.pop("key", req.key), position, ids, **fields)
        self.dispatcher.on_tokens(by or req.nodes[-1], [entry])

    def fail(self, req: RunningReq, node: Node, status: int = 500, **fields: Any) -> None:
        """The node cannot go on with a request."""
        failed = Failed(fields.pop("key", req.key), status, fields.pop("message", "it says why"), **fields)
        self.dispatcher.on_failed(node, failed)

    def kill(self, node: Node, loss: Loss = Loss.CRASHED) -> None:
        """The node is lost."""
        of_role = self.decodes if node.role is Role.DECODE else self.prefills
        of_role[:] = [other for other in of_role if other is not node]
        self.dispatcher.on_node_lost(node, "connection closed", loss)

    def metric(self, name: str) -> Metric:
        """What is told of `name`, as Prometheus reads it."""
        return families(self.metrics.export().decode())[name]

    def figure(self, name: str) -> float:
        """The value of a counter or gauge without labels of its own."""
        return float(self.metric(name).samples[0].value)


def decode_of(req: RunningReq) -> SeenNode:
    """The last of the nodes of a request."""
    node = req.nodes[-1]
    assert isinstance(node, SeenNode)
    return node


def families(text: str) -> dict[str, Metric]:
    """The metrics of an export, by name."""
    found = list(text_string_to_metric_families(text))
    by_name = {family.name: family for family in found}
    assert len(by_name) == len(found), "Prometheus refuses a scrape that has a figure twice"
    return by_name
