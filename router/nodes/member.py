"""One member of the fleet, as a router sees it, and what makes a node unfit to be one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from router.nodes.node_link import LiveNode, Refusal
from shared.protocol.messages import KVLayout, Role


class MemberState(StrEnum):
    """How a member stands with this router."""

    DIALLING = "dialling"
    ALIVE = "alive"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(eq=False)
class Member:
    """An address that is dialled. `pinned` ones were named by the operator and are never forgotten by themselves.

    `node` is there as long as it is connected: alive or draining. One that is `leaving` is not dialled again, nor is
    one whose process has ended, which `exited` tells. With `resume`, a node that was drained is told to take work.
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
    leaving: bool = False
    resume: bool = False
    since: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The node's id, or its address as long as the id is not known."""
        return self.node_id or self.address


def raise_if_different(ours: KVLayout, theirs: KVLayout) -> None:
    """Refuse a layout that differs, by the name of the first such field."""
    for field in KVLayout.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise Refusal(f"{field}: the fleet has {mine!r}, this node has {other!r}")
