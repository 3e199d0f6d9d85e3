"""What the autoscaler asks a router: the nodes with their loads, and to drain and remove one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote

import msgspec

from planner.autoscaler.decision import NodeState
from planner.autoscaler.observe import LoadReport, NodeReport
from router.terminal.client import ClientError, RouterClient
from shared.protocol.messages import Role

ANSWER_S = 10.0
_GONE = 404
_UNAVAILABLE = 503
_STATES = {
    "alive": NodeState.LIVE,
    "draining": NodeState.DRAINING,
    "dialling": NodeState.COMING,
    "lost": NodeState.COMING,
    "loading": NodeState.COMING,
}
"""A node that was refused, or that has left, does not count."""


class FleetApi(Protocol):
    """A router. Real: `FleetClient`. Calls block, and raise `ClientError`."""

    def nodes(self) -> dict[Role, list[FleetNode]]:
        """All nodes, also those that load."""
        ...

    def remove(self, node_id: str, drain_timeout_s: float) -> None:
        """Drain a node and remove it; returns when that is done, or when there is no such node any more."""
        ...


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node in `GET /fleet`, or one that loads, in `GET /health`."""

    node_id: str | None
    state: str
    role: Role | None = None
    address: str = ""
    incarnation: str = ""
    load: LoadReport | None = None

    @property
    def name(self) -> str:
        """Its id, or its address until that is known."""
        return self.node_id or self.address


class _Fleet(msgspec.Struct, frozen=True):
    nodes: list[FleetNode]


class _Health(msgspec.Struct, frozen=True):
    prefill: list[FleetNode]
    decode: list[FleetNode]


class FleetClient:
    """Asks over HTTP, with the key of an administrator where the router has one."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client

    def nodes(self) -> dict[Role, list[FleetNode]]:
        """All nodes, also those that load. Raises ClientError."""
        try:
            listed = msgspec.json.decode(self._client.get("/fleet", ANSWER_S), type=_Fleet).nodes
            health = msgspec.json.decode(self._health(), type=_Health)
        except msgspec.MsgspecError as error:
            raise ClientError(f"{self._client.url} answers as no router of this release: {error}") from None
        found: dict[Role, list[FleetNode]] = {role: [] for role in Role}
        for node in listed:
            if node.role is not None:
                found[node.role].append(node)
        for role, of_role in ((Role.PREFILL, health.prefill), (Role.DECODE, health.decode)):
            known = {node.name for node in found[role]}
            found[role] += [n for n in of_role if n.state == "loading" and n.name not in known]
        return found

    def remove(self, node_id: str, drain_timeout_s: float) -> None:
        """Drain a node and remove it; returns when that is done, or when there is no such node any more."""
        path = f"/fleet/nodes/{quote(node_id, safe='')}?drain_timeout_s={drain_timeout_s:g}"
        try:
            self._client.delete(path, drain_timeout_s + ANSWER_S)
        except ClientError as error:
            if error.status != _GONE:
                raise

    def _health(self) -> bytes:
        try:
            return self._client.get("/health", ANSWER_S)
        except ClientError as error:
            if error.status == _UNAVAILABLE:
                return error.body  # it has the nodes all the same
            raise


def reports(nodes: Sequence[FleetNode]) -> list[NodeReport]:
    """The nodes that count, each once."""
    found = {
        node.name: NodeReport(
            node_id=node.name, state=_STATES[node.state], incarnation=node.incarnation, load=node.load
        )
        for node in nodes
        if node.state in _STATES
    }
    return list(found.values())
