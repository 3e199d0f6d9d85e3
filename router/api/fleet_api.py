"""`/fleet` lists the nodes; adds, removes them and changes their roles while requests run. It needs the admin key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response, params
from msgspec import UNSET
from msgspec.structs import asdict

from router.api.openapi import new_routes
from router.http.api_keys import AdminGuard, ApiKeys
from router.http.body import Body, about
from router.http.responses import answers, json_response
from router.nodes.fleet_answers import Fleet, FleetNode, NodeReady, NodeRemoved
from router.nodes.fleet_changes import ADD_WAIT_S, FleetChanges
from router.nodes.member import Member
from router.nodes.membership import Membership
from router.nodes.status import describe_node
from router.topology import address_of
from shared.errors import RequestError
from shared.protocol.loopback import is_loopback
from shared.protocol.messages import Role

DEFAULT_DRAIN_TIMEOUT_S = 60.0
_MAX_DRAIN_TIMEOUT_S = 86400.0


class AddNode(Body):
    """A running node to be dialled."""

    role: Literal["prefill", "decode"] = about("Which fleet it joins.")
    address: str = about("HOST[:PORT], as --prefill", min_length=1, max_length=512)


class ChangeRole(Body):
    """Another role for a node."""

    role: Literal["prefill", "decode"] = about("The role that it is to have.")


DrainTimeout = Annotated[
    float,
    Query(
        ge=0,
        le=_MAX_DRAIN_TIMEOUT_S,
        allow_inf_nan=False,
        description="Its requests may run on for so many seconds.",
    ),
]


def fleet_admin_routes(
    membership: Membership,
    changes: FleetChanges,
    guards: Sequence[params.Depends],
) -> APIRouter:
    """The routes; `guards` raise for a caller that may not use them."""
    router = new_routes("Operation", prefix="/fleet", dependencies=guards)

    def find(node_id: str) -> Member:
        member = changes.find(node_id)
        if member is None:
            raise RequestError(
                f"there is no node {node_id!r} in the fleet", status=404, code="no_such_node", param="node_id"
            )
        return member

    async def ready(member: Member) -> Response:
        await membership.refresh()
        return json_response(NodeReady(node=_described(member)))

    @router.get("", responses=answers(Fleet))
    async def fleet() -> Response:
        """Every node that is dialled, with its load asked for now."""
        await membership.refresh()
        nodes = [_described(member) for member in membership.members]
        return json_response(Fleet(nodes=nodes))

    @router.post("/nodes", responses=answers(NodeReady))
    async def add_node(asked: AddNode) -> Response:
        """Dial a running node; answers when it has been taken in or refused, or after ten seconds."""
        role = Role(asked.role)
        member = await changes.add(role, _address(role, asked.address), ADD_WAIT_S)
        return await ready(member)

    @router.post("/nodes/{node_id:path}/role", responses=answers(NodeReady))
    async def change_role(
        asked: ChangeRole, node_id: str, drain_timeout_s: DrainTimeout = DEFAULT_DRAIN_TIMEOUT_S
    ) -> Response:
        """Drain a node and have it serve in the other role; answers when it is back, with its model still loaded."""
        member = await changes.change_role(find(node_id), Role(asked.role), drain_timeout_s, ADD_WAIT_S)
        return await ready(member)

    @router.delete("/nodes/{node_id:path}", responses=answers(NodeRemoved))
    async def remove_node(node_id: str, drain_timeout_s: DrainTimeout = DEFAULT_DRAIN_TIMEOUT_S) -> Response:
        """Send a node nothing new, and hang up when its requests have ended or the time is up."""
        member = find(node_id)
        num_failed_over = await changes.remove(member, drain_timeout_s)
        removed = NodeRemoved(
            node_id=member.node_id or None, address=member.address, num_failed_over=num_failed_over
        )
        return json_response(removed)

    return router


def fleet_guards(keys: ApiKeys, host: str, admin_only: AdminGuard) -> Sequence[params.Depends]:
    """What guards the routes of a router that listens on `host`.

    A caller that may add a node may read every prompt. Without an admin key no caller may, unless there are no keys
    at all and only this machine can reach the router.
    """

    async def needs_an_admin_key() -> None:
        if not keys.has_admins and (keys.has_clients or not is_loopback(host)):
            raise RequestError(
                "/fleet needs an admin key: start the router with --admin-api-key or --admin-api-key-file",
                status=403,
                code="no_admin_key",
            )

    return [Depends(needs_an_admin_key), Depends(admin_only)]


def _described(member: Member) -> FleetNode:
    """A member with its load, if it has told one since it was connected."""
    node = member.node
    load = asdict(node.load) if node is not None and node.load_at else UNSET
    return describe_node(member, pinned=member.pinned, load=load)


def _address(role: Role, text: str) -> str:
    try:
        return address_of(role, text)
    except ValueError as e:
        raise RequestError(f"address: {e}", param="address") from e
