"""LiveState samples the fleets and this router's traffic each second, for the feed of `/live`.

It samples always, so that a page that is opened shows the last ten minutes: the first event of a feed has their
samples, and each later event has the new ones. A sample is made of what the nodes have told last (their Pongs), which
takes well under a millisecond for a small fleet. The totals of each fleet have a history; of a single node only the
state of now is known. Times are seconds, rates are per second, pages are KV pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from router.api.openapi import new_routes
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.metrics import WINDOW_ROLLS, Metrics
from router.http.answer import Answer
from router.http.responses import EventStream, answers, json_response, stream_response
from router.nodes.member import Member, MemberState
from router.nodes.membership import Membership
from router.nodes.status import VERSION, FleetStatus
from router.text.served_model import ModelSlot
from shared.protocol.messages import LinkReport, Role
from shared.timeline import Clock

_SHORTEST_RATE_S = 0.5
_STATES = {MemberState.ALIVE: "live", MemberState.LOST: "gone", MemberState.LEFT: "gone"}
"""Where the page has a word of its own."""
SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 600
PERCENTILES = (0.5, 0.9, 0.99)


class RouterNow(Answer, frozen=True, kw_only=True):
    """The router that answers. `context_length` is None while no node has said which model it serves.

    `worker` is the router's name if it is one of several (--router-workers). Figures of clients are this router's
    own; figures of nodes count the requests of all routers.
    """

    worker: str | None
    status: str
    reason: str
    model: str
    version: str
    has_chat_template: bool
    context_length: int | None
    percentile_window_s: float


class Figures(Answer, frozen=True, kw_only=True):
    """The load of a node, or of a fleet. KV bytes count where they arrive and where they leave.

    Held pages belong to requests and transfers. Cached pages belong only to the RadixCache, which evicts them when
    they are needed. `tokens_per_s` counts generated tokens.
    """

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_transferring_reqs: int = 0
    tokens_per_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_held_pages: int = 0


class NodeNow(Figures, frozen=True, kw_only=True):
    """A node. `state` is loading, dialling, live, draining, refused or gone; `reason` says why it is not live.

    `prompt_tokens_per_s` counts computed tokens without cached ones. `links` counts `num_links` by transport, and
    `links_words` says why none is better.
    """

    node_id: str
    role: str
    address: str
    state: str
    reason: str = ""
    loaded: float | None = None
    num_bootstrapping_reqs: int = 0
    num_retracted_reqs: int = 0
    num_links: int = 0
    links: dict[str, int] = msgspec.field(default_factory=dict)
    links_words: list[str] = msgspec.field(default_factory=list)
    prompt_tokens_per_s: float = 0.0


class FleetSample(Figures, frozen=True, kw_only=True):
    """The connected nodes of one role, added up. Those that wait for pages are in its queue."""

    num_nodes: int


class Sample(Answer, frozen=True, kw_only=True):
    """One second. Percentiles (see PERCENTILES) are over the last few, and None if nothing was observed in them.

    Of this router's sequences, `num_running_reqs` stream and `num_queue_reqs` wait for their first token.
    `rejected_per_s` counts HTTP requests that were refused with a 429.
    """

    time: float
    num_running_reqs: int
    num_queue_reqs: int
    tokens_per_s: float
    rejected_per_s: float
    ttft_s: tuple[float, ...] | None
    itl_s: tuple[float, ...] | None
    prefill: FleetSample
    decode: FleetSample


class LiveEvent(Answer, frozen=True, kw_only=True):
    """One event of the feed."""

    router: RouterNow
    nodes: list[NodeNow]
    samples: list[Sample]


@dataclass
class _Counters:
    """Counters of a node or of this router, which only grow, and their rates between two readings."""

    at: float
    totals: tuple[float, ...]
    per_s: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.per_s = (0.0,) * len(self.totals)

    def update(self, at: float, totals: tuple[float, ...]) -> None:
        """Take a reading. One that follows the last too soon for a rate is ignored."""
        elapsed = at - self.at
        if elapsed < _SHORTEST_RATE_S:
            return
        self.per_s = tuple(
            round((now - before) / elapsed, 3) for now, before in zip(totals, self.totals, strict=True)
        )
        self.at, self.totals = at, totals


class LiveState:
    """The samples of the last minutes. `run` takes them, `feed` and `event` return them, all on the router's loop."""

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        traffic: Metrics,
        status: FleetStatus,
        model: ModelSlot,
        worker: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._membership = membership
        self._dispatcher = dispatcher
        self._traffic = traffic
        self._status = status
        self._model = model
        self._worker = worker
        self._clock = clock
        self._sampled_at = clock()
        self._own = _Counters(self._sampled_at, (0, 0))
        self._nodes_counters: dict[str, _Counters] = {}
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._num_sampled = 0
        self._sampled = asyncio.Event()
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Sample once a second, until `close`."""
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(self._sampled_at + SAMPLE_INTERVAL_S - self._clock()):
                    await self._closed.wait()
            except TimeoutError:
                self.sample()

    def sample(self) -> None:
        """Take the sample of the second that is over, and wake every feed."""
        now = self._clock()
        self._sampled_at = now
        traffic = self._traffic
        traffic.roll()
        self._own.update(now, (traffic.num_tokens, traffic.num_rejected))
        self._read_counters()
        tokens_per_s, rejected_per_s = self._own.per_s
        num_queued = len(self._dispatcher.queue)
        self._samples.append(
            Sample(
                time=round(time.time(), 3),
                num_running_reqs=self._dispatcher.num_running - num_queued,
                num_queue_reqs=num_queued,
                tokens_per_s=tokens_per_s,
                rejected_per_s=rejected_per_s,
                ttft_s=traffic.ttft.percentiles(PERCENTILES),
                itl_s=traffic.itl.percentiles(PERCENTILES),
                prefill=_added_up(self._connected(Role.PREFILL)),
                decode=_added_up(self._connected(Role.DECODE)),
            )
        )
        self._num_sampled += 1
        self._wake()

    async def feed(self) -> AsyncGenerator[LiveEvent, None]:
        """An event with all samples, then one whenever there is a new sample, until `close`.

        A watcher that reads slowly gets fewer events with more samples each; nothing is kept for it.
        """
        num_sent = 0
        while not self._closed.is_set():
            event, num_sent, sampled = self.event(num_sent), self._num_sampled, self._sampled
            yield event
            await sampled.wait()

    def event(self, num_sent: int = 0) -> LiveEvent:
        """The state now, and the samples after the first `num_sent` ever taken, as far as they are kept."""
        num_new = min(self._num_sampled - num_sent, len(self._samples))
        first = len(self._samples) - num_new
        return LiveEvent(
            router=self._router(),
            nodes=self._nodes(),
            samples=[self._samples[at] for at in range(first, len(self._samples))],
        )

    def close(self) -> None:
        """End every feed."""
        self._closed.set()
        self._wake()

    # ------------------------------------------------------------------------------------------ inside
    def _wake(self) -> None:
        self._sampled.set()
        self._sampled = asyncio.Event()

    def _read_counters(self) -> None:
        known, self._nodes_counters = self._nodes_counters, {}
        for node in self._membership.all_live():
            if not node.load_at:
                continue  # no pong yet
            load = node.load
            computed = load.num_prompt_tokens - load.num_cached_tokens
            totals = (computed, load.num_generated_tokens, load.kv_bytes_transferred)
            counters = known.get(node.ref.incarnation) or _Counters(node.load_at, totals)
            counters.update(node.load_at, totals)
            self._nodes_counters[node.ref.incarnation] = counters

    def _router(self) -> RouterNow:
        status, reason = self._status.state()
        known = self._model.known
        return RouterNow(
            worker=self._worker,
            status=status,
            reason=reason,
            model=self._model.name(),
            version=VERSION,
            has_chat_template=known and self._model.get().chat_template is not None,
            context_length=self._status.context_length() if known else None,
            percentile_window_s=WINDOW_ROLLS * SAMPLE_INTERVAL_S,
        )

    def _nodes(self) -> list[NodeNow]:
        nodes = [self._member(member) for member in self._membership.members]
        dialled = {node.node_id for node in nodes}
        nodes += [
            NodeNow(
                node_id=loading.node_id,
                role=loading.role,
                address="",
                state="loading",
                reason=loading.what,
                loaded=loading.fraction,
            )
            for loading in self._membership.loading
            if loading.node_id not in dialled
        ]
        return sorted(nodes, key=lambda node: (node.role != Role.PREFILL, node.node_id or node.address))

    def _connected(self, role: Role) -> list[NodeNow]:
        members = self._membership.members
        return [self._member(member) for member in members if member.role is role and member.node is not None]

    def _member(self, member: Member) -> NodeNow:
        known: dict[str, Any] = {
            "role": member.role,
            "state": _STATES.get(member.state, member.state),
            "reason": member.reason,
        }
        node = member.node
        if node is None:
            return NodeNow(**known, node_id=member.node_id, address=member.address)
        load, counters = node.load, self._nodes_counters.get(node.ref.incarnation)
        prompt_tokens_per_s, tokens_per_s, kv_bytes_per_s = counters.per_s if counters else (0.0,) * 3
        return NodeNow(
            **known,
            node_id=node.ref.node_id,
            address=node.ref.address,
            num_running_reqs=load.num_running,
            num_queue_reqs=load.num_waiting,
            num_bootstrapping_reqs=load.num_bootstrapping,
            num_transferring_reqs=load.num_transferring,
            num_retracted_reqs=load.num_retracted,
            num_pages=load.num_pages,
            num_free_pages=load.num_free_pages,
            num_cached_pages=load.num_evictable_pages,
            num_held_pages=load.num_held_pages,
            num_links=load.num_links,
            links=dict(sorted(Counter(link.transport for link in load.links).items())),
            links_words=links_words(load.links),
            prompt_tokens_per_s=prompt_tokens_per_s,
            tokens_per_s=tokens_per_s,
            kv_bytes_per_s=kv_bytes_per_s,
        )


def _added_up(nodes: Iterable[NodeNow]) -> FleetSample:
    nodes = list(nodes)
    total = {name: sum(getattr(node, name) for node in nodes) for name in Figures.__struct_fields__}
    total["num_queue_reqs"] += sum(node.num_bootstrapping_reqs for node in nodes)
    return FleetSample(num_nodes=len(nodes), **total)


def live_routes(live: LiveState) -> APIRouter:
    """The feed, and one event of it."""
    router = new_routes("State")

    @router.get("/live", status_code=200, response_class=EventStream, responses=answers(event=LiveEvent))
    async def feed(request: Request) -> Response:
        """Server-sent events, one a second: router, nodes and samples."""
        return await stream_response(request, live.feed())

    @router.get("/live/state", responses=answers(LiveEvent))
    async def state() -> Response:
        """The same as one JSON object, with the samples of the last ten minutes."""
        return json_response(live.event())

    return router


def links_words(links: Iterable[LinkReport]) -> list[str]:
    """A text for each transport and each set of reasons why it is not a better one."""
    alike = Counter((link.transport, tuple(link.passed_over.items())) for link in links)
    return [
        "; ".join([f"{num_links} {transport}", *(f"not {name}: {why}" for name, why in passed_over)])
        for (transport, passed_over), num_links in sorted(alike.items())
    ]
