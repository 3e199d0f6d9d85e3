"""Runs a request alone that may be what crashed other nodes, so that a further crash is no other request's doing.

    waiting     the requests that this node holds are moved to other nodes; after EMPTY_S the rest is handed back
    said        RunsAlone is on its way to the router, which must have it if the request crashes this process at once
    under way   from its first forward until the request has the tokens that its router asked for, or has ended

Meanwhile this node hands back all other requests.
"""

from __future__ import annotations

from collections.abc import Callable

from shared import log
from shared.engine.req_table import ReqTable
from shared.protocol.messages import RunsAlone
from shared.protocol.router_port import RouterPort
from shared.scheduling.req import Req
from shared.timeline import Clock

EMPTY_S = 2.0
"""How long requests have to be moved away before they are handed back, which costs a prefill of each."""
LEAVE_S = 0.2
"""How long a message has to leave this process. A socket does not tell when it has."""
HANDED_BACK = "this node runs another request alone"


class Trial:
    """A request that runs, or is to run, alone on this node for `num_tokens`. `enqueue` lets it begin."""

    def __init__(
        self,
        req: Req,
        num_tokens: int,
        enqueue: Callable[[], None],
        *,
        reqs: ReqTable,
        router_port: RouterPort,
        clock: Clock,
    ) -> None:
        self._req, self._until = req, req.output_len + num_tokens
        self._enqueue: Callable[[], None] | None = enqueue
        self._reqs = reqs
        self._router_port = router_port
        self._clock = clock
        self._empty_by = clock() + EMPTY_S
        self._begins_at: float | None = None
        """None while this node holds other requests."""
        others = self._others()
        router_port.want_moved(other.key for other in others)
        log.event("trial", **req.fields, num_others=len(others))

    @property
    def excludes_others(self) -> bool:
        """Whether the request waits to run alone, or does."""
        return self._req.key in self._reqs and self._req.output_len < self._until

    def advance(self) -> None:
        """Let the request begin once this node holds no other, and has said so."""
        if self._enqueue is None or not self.excludes_others:
            return
        if self._begins_at is not None:
            if self._clock() >= self._begins_at:
                enqueue, self._enqueue = self._enqueue, None
                enqueue()
            return
        if self._clock() >= self._empty_by:
            for other in self._others():
                if other.finish is None:
                    self._router_port.hand_back(other.key, HANDED_BACK)
                    self._reqs.end(other.key, HANDED_BACK)
        if not self._others():
            self._begins_at = self._clock() + LEAVE_S
            self._router_port.say(RunsAlone(self._req.key))

    def _others(self) -> list[Req]:
        return [other for other in self._reqs.values() if other is not self._req]
