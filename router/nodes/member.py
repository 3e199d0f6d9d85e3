"""One member of the fleet, as a router sees it, and the check that layouts are equal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.nodes.live_node import LiveNode
from router.nodes.node_link import Refusal
from shared.protocol.messages import KVLayout, NodeHello, Role


class MemberState(StrEnum):
    """The state of a member at this router."""

    DIALLING = "dialling"
    ALIVE = "alive"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(eq=False)
class Member:
    """An address that is dialled.

    The operator named `pinned` members, which are never forgotten by themselves; nor are those that are `listed` by a
    discovery.

    `node` is set while the member is connected: alive or draining. A member is not dialled again if it is `leaving`,
    or if its process has ended with the reason `exited`. While the operator adds it, `resume` is set: then a drained
    node takes work again, and its role must be `role`. Later `role` is what the node says.
    """

    address: str
    role: Role
    pinned: bool
    state: MemberState = MemberState.DIALLING
    reason: str = ""
    exited: str = ""
    node_id: str = ""
    incarnation: str = ""
    node: LiveNode | None = None
    listed: bool = False
    leaving: bool = False
    next_role: Role | None = None
    """In which it is to come back, if it was told so and is connected or has just left."""
    resume: bool = False
    since: float = 0.0
    task: asyncio.Task[None] | None = None
    dialled: str = ""
    """The address of the latest dial, with a number for a host."""

    @property
    def name(self) -> str:
        """The node's id, or its address as long as the id is not known."""
        return self.node_id or self.address

    @property
    def log_fields(self) -> dict[str, Any]:
        """What is known of it: its address, and its id once it has said that."""
        return {"node": self.node_id, "address": self.address} if self.node_id else {"address": self.address}


def raise_if_different(ours: KVLayout, theirs: KVLayout) -> None:
    """Refuse a layout that differs, by the name of the first such field. Numerics may differ within a fleet."""
    for field in KVLayout.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other and field != "numerics":
            raise Refusal(f"{field}: the fleet has {mine or 'none'!r}, this node has {other or 'none'!r}")


def raise_if_impossible(hello: NodeHello) -> None:
    """Refuse a node by the name of a size that it cannot have."""
    for part in (hello.layout, hello.limits):
        for field in part.__struct_fields__:
            if isinstance(size := getattr(part, field), int) and size < 1:
                raise Refusal(f"{field}: {size} is below 1")
