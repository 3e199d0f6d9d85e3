"""The autoscaler over a simulated fleet: the decisions of the real one, carried out under the virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from planner.autoscaler.decision import Add, Autoscaler, Decision, Drain, NodeState
from planner.autoscaler.observe import FleetLoads, LoadReport, NodeReport
from planner.simulator.fleet import SimFleet
from shared.protocol.messages import Role

DRAIN_TIMEOUT_S = 60.0


class Taken(NamedTuple):
    """An action, when and why."""

    at: float
    role: Role
    action: Add | Drain
    decision: Decision


class SimAutoscaling:
    """Looks at the fleet every `interval_s` until `until`; a node that is asked for joins after the pace's `start_s`.

    `taken` has all actions, in order.
    """

    def __init__(self, fleet: SimFleet, autoscalers: Sequence[Autoscaler], until: float) -> None:
        self.taken: list[Taken] = []
        self._fleet = fleet
        self._until = until
        self._numbers = itertools.count()
        for autoscaler in autoscalers:
            self._look(autoscaler, FleetLoads(autoscaler.role))

    def _look(self, autoscaler: Autoscaler, loads: FleetLoads) -> None:
        fleet, role, pace = self._fleet, autoscaler.role, autoscaler.pace
        now = fleet.loop.now
        decision = autoscaler.decide(now, loads.observe(now, node_reports(fleet, role)))
        match decision.action:
            case Add(num_nodes):
                for _ in range(num_nodes):
                    name = f"{role}-added-{next(self._numbers)}"
                    fleet.loop.at(now + pace.start_s, fleet.start, name, role)
            case Drain(node_id):
                fleet.drain(node_id, DRAIN_TIMEOUT_S)
        if decision.action is not None:
            self.taken.append(Taken(now, role, decision.action, decision))
        if now + pace.interval_s <= self._until:
            fleet.loop.at(now + pace.interval_s, self._look, autoscaler, loads)


def node_reports(fleet: SimFleet, role: Role) -> list[NodeReport]:
    """The nodes of a role as a router's `GET /fleet` would tell them now."""
    return [
        NodeReport(
            node_id=name,
            state=NodeState.LIVE if fleet.is_live(node) else NodeState.DRAINING,
            incarnation=node.ref.incarnation,
            load=msgspec.convert(node.load, LoadReport, from_attributes=True),
        )
        for name, node in fleet.nodes.items()
        if node.role is role
    ]
