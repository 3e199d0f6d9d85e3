"""The fleets and this router's traffic, second by second, for whoever watches.

Sampling is always on, so that a page that is opened shows the last minutes: it reads what pongs have brought, and
takes well under a millisecond for a small fleet. Only totals are kept as history; nodes are told as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass

from router.dispatch import Dispatcher
from router.live_feed import (
    MAX_SAMPLES,
    PERCENTILES,
    SAMPLE_INTERVAL_S,
    FleetSample,
    LiveEvent,
    NodeNow,
    RouterNow,
    Sample,
)
from router.member import Member, MemberState
from router.membership import Membership
from router.node_link import LiveNode
from router.recent_traffic import WINDOW_ROLLS, RecentTraffic
from router.served_model import ModelSlot
from router.status import VERSION, FleetStatus
from shared.protocol.messages import Role
from shared.timeline import Clock

_SHORTEST_RATE_S = 0.5
_STATES: Mapping[MemberState, str] = {
    MemberState.DIALLING: "dialling",
    MemberState.ALIVE: "live",
    MemberState.DRAINING: "draining",
    MemberState.REFUSED: "refused",
    MemberState.LOST: "gone",
    MemberState.LEFT: "gone",
}


@dataclass
class _Rate:
    """How fast a node's counters grow, from one pong to the next."""

    at: float
    num_tokens: int
    num_bytes: int
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0

    def update(self, at: float, num_tokens: int, num_bytes: int) -> None:
        """Counters as a pong told them; two pongs at nearly the same time say nothing of a rate."""
        elapsed = at - self.at
        if elapsed < _SHORTEST_RATE_S:
            return
        self.tokens_per_s = (num_tokens - self.num_tokens) / elapsed
        self.bytes_per_s = (num_bytes - self.num_bytes) / elapsed
        self.at, self.num_tokens, self.num_bytes = at, num_tokens, num_bytes


class LiveState:
    """`run` samples; `feed` and `event` tell. All on the router's loop."""

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        traffic: RecentTraffic,
        status: FleetStatus,
        model: ModelSlot,
        clock: Clock = time.monotonic,
    ) -> None:
        self._membership = membership
        self._dispatcher = dispatcher
        self._traffic = traffic
        self._status = status
        self._model = model
        self._clock = clock
        self._started_at = self._sampled_at = clock()
        self._rates: dict[str, _Rate] = {}
        self._num_tokens = 0
        self._num_reqs = 0
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
        """A second is over: take a sample and wake every feed."""
        now = self._clock()
        elapsed, self._sampled_at = max(now - self._sampled_at, 1e-3), now
        traffic = self._traffic
        traffic.roll()
        self._update_rates()
        num_queued = self._dispatcher.num_without_token
        self._samples.append(
            Sample(
                time=time.time(),
                num_running_reqs=self._dispatcher.num_running - num_queued,
                num_queue_reqs=num_queued,
                tokens_per_s=(traffic.num_tokens - self._num_tokens) / elapsed,
                reqs_per_s=(traffic.num_reqs - self._num_reqs) / elapsed,
                ttft_s=traffic.ttft.percentiles(PERCENTILES),
                itl_s=traffic.itl.percentiles(PERCENTILES),
                prefill=_added_up(self._connected(Role.PREFILL)),
                decode=_added_up(self._connected(Role.DECODE)),
            )
        )
        self._num_tokens, self._num_reqs = traffic.num_tokens, traffic.num_reqs
        self._num_sampled += 1
        self._wake()

    async def feed(self) -> AsyncGenerator[LiveEvent, None]:
        """An event with all samples, then one whenever there is a new sample, until `close`.

        A watcher that reads slowly gets fewer events with more samples each; nothing is kept for it.
        """
        num_told = 0
        while not self._closed.is_set():
            event, num_told, sampled = self.event(num_told), self._num_sampled, self._sampled
            yield event
            await sampled.wait()

    def event(self, num_told: int = 0) -> LiveEvent:
        """Everything now, and the samples after the first `num_told` ever taken, as far as they are kept."""
        num_new = min(self._num_sampled - num_told, len(self._samples))
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

    def _update_rates(self) -> None:
        known, self._rates = self._rates, {}
        for node in self._membership.all_live():
            load = node.load
            if not node.load_at:
                continue  # no pong yet
            counters = node.load_at, load.num_generated_tokens, load.kv_bytes_transferred
            rate = known.get(node.ref.incarnation)
            if rate is None:
                rate = _Rate(*counters)
            else:
                rate.update(*counters)
            self._rates[node.ref.incarnation] = rate

    def _router(self) -> RouterNow:
        status, reason = self._status.state()
        known = self._model.known
        return RouterNow(
            status=status,
            reason=reason,
            model=self._model.name(),
            version=VERSION,
            has_chat_template=known and self._model.get().chat_template is not None,
            context_length=self._status.context_length() if known else None,
            uptime_s=self._clock() - self._started_at,
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
            for loading in self._membership.loading.values()
            if loading.node_id not in dialled
        ]
        return sorted(nodes, key=lambda node: (node.role != Role.PREFILL, node.node_id or node.address))

    def _member(self, member: Member) -> NodeNow:
        if member.node is not None:
            return self._node(member.node, member)
        return NodeNow(
            node_id=member.node_id,
            role=member.role,
            address=member.address,
            state=_STATES[member.state],
            reason=member.reason,
        )

    def _connected(self, role: Role) -> list[NodeNow]:
        members = [member for member in self._membership.members if member.role is role]
        return [self._node(member.node, member) for member in members if member.node is not None]

    def _node(self, node: LiveNode, member: Member) -> NodeNow:
        load, rate = node.load, self._rates.get(node.ref.incarnation)
        return NodeNow(
            node_id=node.ref.node_id,
            role=node.role,
            address=node.ref.address,
            state=_STATES[member.state],
            reason=member.reason,
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
            tokens_per_s=rate.tokens_per_s if rate else 0.0,
            kv_bytes_per_s=rate.bytes_per_s if rate else 0.0,
        )


def _added_up(nodes: Iterable[NodeNow]) -> FleetSample:
    nodes = list(nodes)
    return FleetSample(
        num_nodes=len(nodes),
        num_running_reqs=sum(node.num_running_reqs for node in nodes),
        num_queue_reqs=sum(node.num_queue_reqs + node.num_bootstrapping_reqs for node in nodes),
        num_transferring_reqs=sum(node.num_transferring_reqs for node in nodes),
        tokens_per_s=sum(node.tokens_per_s for node in nodes),
        kv_bytes_per_s=sum(node.kv_bytes_per_s for node in nodes),
        num_pages=sum(node.num_pages for node in nodes),
        num_free_pages=sum(node.num_free_pages for node in nodes),
        num_cached_pages=sum(node.num_cached_pages for node in nodes),
        num_held_pages=sum(node.num_held_pages for node in nodes),
    )
