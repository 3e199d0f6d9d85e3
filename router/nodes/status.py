"""The state of the fleets, for /health and /server_info."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from router.dispatch.placement import why_unlinked
from router.nodes.fleet_answers import FleetNode, Health, ServerInfo
from router.nodes.member import Member, MemberState
from router.nodes.membership import Membership
from router.text.reply_parser import NO_PARSER
from router.text.served_model import ModelSlot
from shared.protocol.messages import Role

VERSION = "0.1.0"


class FleetStatus:
    """Reads the membership; `stopping` is set when the router stops."""

    def __init__(self, membership: Membership, model: ModelSlot) -> None:
        self._membership = membership
        self._model = model
        self.stopping = False

    @property
    def can_serve(self) -> bool:
        """True when any request can be served: a decode node can prefill too, the reverse does not hold."""
        return not self.stopping and self._model.known and bool(self._membership.live(Role.DECODE))

    def context_length(self) -> int:
        """The longest prompt and output that every live decode node takes; the model's, while none is alive."""
        decode = self._membership.live(Role.DECODE)
        if decode:
            return min(node.limits.context_length for node in decode)
        return self._model.get().context_length

    def describe(self) -> Health:
        """The body of /health."""
        state, reason = self.state()
        return Health(
            status=state,
            model=self._model.name(),
            prefill=self._fleet(Role.PREFILL),
            decode=self._fleet(Role.DECODE),
            reason=reason or UNSET,
        )

    def server_info(self) -> ServerInfo:
        """Sizes, and per node its flags, limits and latest load."""
        connected = [(m, m.node) for m in self._membership.members if m.node is not None]
        layout = connected[0][1].hello.layout if connected else None
        decode = self._membership.live(Role.DECODE)
        return ServerInfo(
            version=VERSION,
            status=self.state()[0],
            model_path=self._model.get().model,
            served_model_name=self._model.name(),
            context_length=self.context_length(),
            max_model_len=self.context_length(),
            page_size=layout.page_size if layout else None,
            dtype=layout.dtype if layout else None,
            quantization=layout.quantization or None if layout else None,
            kv_cache_dtype=layout.kv_cache_dtype or layout.dtype if layout else None,
            max_total_num_tokens=min((n.limits.max_total_num_tokens for n in decode), default=0),
            max_running_requests=sum(n.limits.max_running_requests for n in decode),
            tool_call_parser=self._model.get().tool_call_parser,
            reasoning_parser="think" if self._model.get().reasons else NO_PARSER,
            internal_states=[
                {"node_id": node.ref.node_id, "role": node.role, **asdict(node.load)} for _, node in connected
            ],
            nodes=[
                describe_node(member, limits=asdict(node.limits), flags=node.hello.flags)
                for member, node in connected
            ],
        )

    def _fleet(self, role: Role) -> list[FleetNode]:
        members = [m for m in self._membership.members if m.role is role]
        loading = [n for n in self._membership.loading if n.role is role]
        return [describe_node(m) for m in members] + [
            FleetNode(node_id=n.node_id, role=role, state="loading", what=n.what, fraction=n.fraction)
            for n in loading
        ]

    def state(self) -> tuple[str, str]:
        """The status as in /health, and why it is not `ok`."""
        membership = self._membership
        if self.stopping:
            return "stopping", "the router is shutting down"
        if not membership.live(Role.DECODE):
            dialling = all(m.state is MemberState.DIALLING for m in membership.members)
            waiting = dialling if membership.members else membership.is_new
            return "starting" if waiting else "unavailable", membership.why_none(Role.DECODE)
        if not self._model.known:
            return "starting", "the model is not known yet"
        if membership.expects(Role.PREFILL) and not membership.live(Role.PREFILL):
            return "degraded", f"decode nodes prefill by themselves: {membership.why_none(Role.PREFILL)}"
        gone = [m for m in membership.members if m.node is None or m.node.load.leak]
        if gone:
            return "degraded", "; ".join(_state_of(m) for m in gone)
        unlinked = self._unlinked()
        if unlinked:
            return "degraded", f"decode nodes prefill by themselves: {'; '.join(unlinked)}"
        return "ok", ""

    def _unlinked(self) -> list[str]:
        """The prefill nodes that can send pages to no decode node, each with a reason."""
        decodes, said = self._membership.live(Role.DECODE), []
        for prefill in self._membership.live(Role.PREFILL):
            reasons = [why_unlinked(prefill, decode) for decode in decodes]
            if reasons and all(reasons):
                said.append(f"{prefill.ref.node_id} has no link to any decode node ({reasons[0]})")
        return said


def _state_of(member: Member) -> str:
    return f"{member.name} is {member.state}" + (f" ({member.reason})" if member.node is not None else "")


def describe_node(member: Member, **more: Any) -> FleetNode:
    """A member as the routes tell it, with `more` fields of a FleetNode."""
    if (node := member.node) is not None:
        more["incarnation"] = node.ref.incarnation
        more["num_running_reqs"], more["num_queue_reqs"] = node.load.num_running, node.load.num_waiting
    return FleetNode(
        node_id=member.node_id or None,
        role=member.role,
        state=member.state,
        address=member.address,
        reason=member.reason or UNSET,
        **more,
    )
