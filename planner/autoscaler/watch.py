"""The autoscaler beside a router: look at the fleet, decide, carry it out, again every few seconds.

router ──GET /fleet──▶ FleetLoads ──▶ Autoscaler.decide ─┬─ Add ───▶ actions.add
                                                         └─ Drain ─▶ DELETE /fleet/nodes ──empty──▶ actions.stop

A router that does not answer is asked again; nothing is decided meanwhile. An Add that fails is repeated after a
pause that doubles, if it is still needed, and no other Add begins before it has ended. A stop that fails is repeated,
too, a few times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from planner.autoscaler.decision import Add, Autoscaler, Drain, NodeState
from planner.autoscaler.fleet_client import FleetApi, FleetNode, reports
from planner.autoscaler.observe import FleetLoads
from planner.autoscaler.scaling_actions import ActionFailed, ScalingActions
from router.terminal.client import ClientError
from shared.log import crash, event, warn
from shared.timeline import Clock

MAX_PAUSE_S = 300.0
_TRIES = 6
_REFUSED = frozenset({400, 401, 403, 409})
"""Answers to a DELETE that another try would not change."""


class ScaledFleet:
    """One fleet, and what happens to it."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self.autoscaler = autoscaler
        self.loads = FleetLoads(autoscaler.role)
        self.nodes: dict[str, FleetNode] = {}
        self.drained_here: set[str] = set()
        """Nodes that are drained for this autoscaler."""
        self.drained_elsewhere: set[str] = set()
        """Nodes that are being drained, but not by this autoscaler."""
        self.is_adding = False
        """Whether an add has not ended. No other begins meanwhile, or all would run once a slow command has ended."""
        self.no_add_until = 0.0
        self.add_pause_s = 0.0


class Watch:
    """`turn` looks once; `run` does so for ever. `pause_s` is the first pause after a failure, in seconds."""

    def __init__(
        self,
        fleet: FleetApi,
        autoscalers: Sequence[Autoscaler],
        actions: ScalingActions,
        *,
        drain_timeout_s: float,
        pause_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._scaled = [ScaledFleet(autoscaler) for autoscaler in autoscalers]
        self._actions = actions
        self._drain_timeout_s = drain_timeout_s
        self._pause_s = pause_s
        self._clock = clock
        self._answers = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look every `interval_s`. Raises ClientError when the router refuses the key."""
        interval_s = min(scaled.autoscaler.pace.interval_s for scaled in self._scaled)
        while True:
            await self.turn()
            await asyncio.sleep(interval_s)

    async def turn(self) -> None:
        """Look at the fleet once, and begin what is decided."""
        try:
            nodes = await asyncio.to_thread(self._fleet.nodes)
        except ClientError as error:
            if error.status in (401, 403):
                raise
            if self._answers:
                warn("router_not_reached", reason=error)
            self._answers = False
            return
        self._answers = True
        now = self._clock()
        for scaled in self._scaled:
            role = scaled.autoscaler.role
            elsewhere = {node.name for other, those in nodes.items() if other is not role for node in those}
            self._look(now, scaled, nodes[role], frozenset(elsewhere))

    async def settled(self) -> None:
        """Wait until all that was begun is done."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def close(self) -> None:
        """Stop; what was begun is said, since nothing will end it."""
        self._actions.close()
        for scaled in self._scaled:
            for node_id in sorted(scaled.drained_here):
                warn(
                    "drain_left_alone",
                    node=node_id,
                    reason="the autoscaler stops; the node may be stopped when empty",
                )

    # ------------------------------------------------------------------------------------------ inside
    def _look(
        self, now: float, scaled: ScaledFleet, nodes: Sequence[FleetNode], elsewhere: frozenset[str]
    ) -> None:
        autoscaler = scaled.autoscaler
        scaled.nodes = {node.name: node for node in nodes}
        seen = msgspec.structs.replace(scaled.loads.observe(now, reports(nodes)), elsewhere=elsewhere)
        draining = {
            node.node_id for node in seen.nodes if node.state is NodeState.DRAINING
        } - scaled.drained_here
        for node_id in sorted(draining - scaled.drained_elsewhere):
            warn("drained_by_others", node=node_id, reason="only one autoscaler may change a fleet")
        scaled.drained_elsewhere = draining
        decision = autoscaler.decide(now, seen)
        if decision.num_overdue:
            warn("nodes_overdue", role=autoscaler.role, num_nodes=decision.num_overdue,
                 after_s=autoscaler.pace.start_limit_s)  # fmt: skip
        match decision.action:
            case Add(num_nodes) if scaled.is_adding or now < scaled.no_add_until:
                autoscaler.add_failed(num_nodes, now)
            case Add(num_nodes):
                event("autoscale_add", role=autoscaler.role, num_nodes=num_nodes, reason=decision.reason)
                scaled.is_adding = True
                self._start_task(partial(self._add, scaled, num_nodes, now, decision.reason))
            case Drain(node_id):
                event("autoscale_drain", role=autoscaler.role, node=node_id, reason=decision.reason)
                scaled.drained_here.add(node_id)
                self._start_task(partial(self._drain, scaled, node_id, decision.reason))

    def _start_task(self, work: Callable[[], Awaitable[None]]) -> None:
        async def logged() -> None:
            try:
                await work()
            except Exception:
                crash("autoscale_task_failed")

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, scaled: ScaledFleet, num_nodes: int, asked_at: float, reason: str) -> None:
        role = scaled.autoscaler.role
        try:
            await self._actions.add(role, num_nodes, reason)
        except ActionFailed as error:
            scaled.autoscaler.add_failed(num_nodes, asked_at)
            scaled.add_pause_s = min(max(self._pause_s, 2 * scaled.add_pause_s), MAX_PAUSE_S)
            scaled.no_add_until = self._clock() + scaled.add_pause_s
            warn(
                "autoscale_add_failed",
                role=role,
                num_nodes=num_nodes,
                retry_in_s=scaled.add_pause_s,
                reason=error,
            )
        else:
            scaled.add_pause_s = 0.0
            scaled.autoscaler.add_done(num_nodes, asked_at, self._clock())
        finally:
            scaled.is_adding = False

    async def _drain(self, scaled: ScaledFleet, node_id: str, reason: str) -> None:
        role, node = scaled.autoscaler.role, scaled.nodes[node_id]
        try:
            if self._actions.drains_nodes:
                # A router that is restarted meanwhile hears of the drain from the node.
                remove = partial(self._fleet.remove, node_id, self._drain_timeout_s)
                await self._retried("autoscale_drain_retried", node_id, partial(asyncio.to_thread, remove))
            else:
                scaled.autoscaler.drain_failed(node_id)
            stop = partial(self._actions.stop, role, node_id, node.address, reason)
            await self._retried("autoscale_stop_retried", node_id, stop)
        except ClientError as error:
            scaled.autoscaler.drain_failed(node_id)
            warn("autoscale_drain_failed", role=role, node=node_id, reason=error)
        except ActionFailed as error:
            warn("empty_node_not_stopped", role=role, node=node_id, address=node.address, reason=error)
        finally:
            scaled.drained_here.discard(node_id)

    async def _retried(self, what: str, node_id: str, act: Callable[[], Awaitable[None]]) -> None:
        """Repeat what fails, after pauses that double. Raises the last failure, or one that will not change."""
        for pause_s in (*(min(self._pause_s * 2**at, MAX_PAUSE_S) for at in range(_TRIES - 1)), None):
            try:
                return await act()
            except (ClientError, ActionFailed) as error:
                if pause_s is None or getattr(error, "status", None) in _REFUSED:
                    raise
                warn(what, node=node_id, retry_in_s=pause_s, reason=error)
            await asyncio.sleep(pause_s)
        return None
