"""The state of the fleets, as /health and /server_info tell it."""

from __future__ import annotations

import msgspec

from router.member import Member, MemberState
from router.membership import Membership
from router.served_model import ModelSlot
from shared.protocol.messages import Role

VERSION = "0.1.0"


class FleetStatus:
    """Reads the membership; `stopping` is set once the router goes down."""

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

    def describe(self) -> dict[str, object]:
        """The body of /health."""
        state, reason = self.state()
        body: dict[str, object] = {"status": state, "model": self._model.name()}
        if reason:
            body["reason"] = reason
        for role in Role:
            body[role] = [describe_member(m) for m in self._membership.members if m.role is role] + [
                {
                    "node_id": loading.node_id,
                    "state": "loading",
                    "what": loading.what,
                    "fraction": loading.fraction,
                }
                for loading in self._membership.loading.values()
                if loading.role is role
            ]
        return body

    def server_info(self) -> dict[str, object]:
        """Sizes, and per node its flags, limits and latest load."""
        connected = [(m, m.node) for m in self._membership.members if m.node is not None]
        live = [node for _, node in connected]
        layout = live[0].hello.layout if live else None
        decode = self._membership.live(Role.DECODE)
        return {
            "version": VERSION,
            "status": self.state()[0],
            "model_path": self._model.get().model,
            "served_model_name": self._model.name(),
            "context_length": self.context_length(),
            "max_model_len": self.context_length(),
            "page_size": layout.page_size if layout else None,
            "dtype": layout.dtype if layout else None,
            "max_total_num_tokens": min((n.limits.max_total_num_tokens for n in decode), default=0),
            "max_running_requests": sum(n.limits.max_running_requests for n in decode),
            "internal_states": [
                {"node_id": node.ref.node_id, "role": node.role, **msgspec.structs.asdict(node.load)}
                for node in live
            ],
            "nodes": [
                {
                    "node_id": node.ref.node_id,
                    "role": node.role,
                    "state": member.state,
                    "incarnation": node.ref.incarnation,
                    "address": node.ref.address,
                    "limits": msgspec.structs.asdict(node.limits),
                    "flags": node.hello.flags,
                }
                for member, node in connected
            ],
        }

    def state(self) -> tuple[str, str]:
        """In one word, and why it is not `ok`."""
        membership = self._membership
        if self.stopping:
            return "stopping", "the router is shutting down"
        if not membership.live(Role.DECODE):
            waiting = all(m.state is MemberState.DIALLING for m in membership.members)
            return "starting" if waiting else "unavailable", membership.why_none(Role.DECODE)
        if not self._model.known:
            return "starting", "the model is not known yet"
        if membership.expects(Role.PREFILL) and not membership.live(Role.PREFILL):
            return "degraded", f"decode nodes prefill by themselves: {membership.why_none(Role.PREFILL)}"
        gone = [m for m in membership.members if m.node is None]
        if gone:
            return "degraded", "; ".join(f"{m.name} is {m.state}" for m in gone)
        return "ok", ""


def describe_member(member: Member) -> dict[str, object]:
    """How a member stands, and how much it has to do."""
    body: dict[str, object] = {
        "node_id": member.node_id or None,
        "address": member.address,
        "state": member.state,
    }
    if member.reason:
        body["reason"] = member.reason
    if member.node is not None:
        load = member.node.load
        body["incarnation"] = member.node.ref.incarnation
        body["num_running_reqs"] = load.num_running
        body["num_queue_reqs"] = load.num_waiting
    return body
