"""Which nodes get no new sequences for now: those that fail one after another, and those that try a suspect alone.

A node that fails FAILURES_TO_OPEN times in a row gets one sequence each OPEN_S, until it has served one to the end
(the circuit breaker of Nygard, "Release It!"). A node that is started anew keeps its failures. A sequence that may be
what crashes nodes (`Failover.is_suspect`) is tried on a node that runs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.dispatch.running_req import Node, RunningReq
from shared.log import event
from shared.timeline import Clock

FAILURES_TO_OPEN = 3
OPEN_S = 10.0
_FORGET_S = 600.0
"""A node of which nothing has failed for so long has no failures any more."""


@dataclass(slots=True)
class _Failures:
    count: int = 0
    last_at: float = 0.0
    shunned_until: float = 0.0


class Suspicion:
    """The failures of each node id, and the suspects that are being tried."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, _Failures] = {}
        self._trials: dict[RunningReq, bool] = {}
        """Whether the node of each has said that it holds nothing else."""

    def shuns(self, node: Node) -> bool:
        """Whether a node should get no new sequences, if there are others."""
        failures = self._failures.get(node.ref.node_id)
        return self.tries_on(node) or (failures is not None and self._clock() < failures.shunned_until)

    # ------------------------------------------------------------------------------------ of nodes
    def failed(self, node: Node) -> None:
        """Count a failure that a node is to blame for, or the loss of its connection."""
        now = self._clock()
        self._failures = {name: one for name, one in self._failures.items() if now < one.last_at + _FORGET_S}
        failures = self._failures.setdefault(node.ref.node_id, _Failures())
        failures.count += 1
        failures.last_at = now
        if failures.count >= FAILURES_TO_OPEN and now >= failures.shunned_until:
            failures.shunned_until = now + OPEN_S
            event("circuit_open", node=node.ref.incarnation, failures=failures.count, for_s=OPEN_S)

    def sent(self, node: Node) -> None:
        """Let no other sequence follow one that is sent to a node that has failed too often."""
        failures = self._failures.get(node.ref.node_id)
        if failures is not None and failures.count >= FAILURES_TO_OPEN:
            failures.shunned_until = self._clock() + OPEN_S

    def served(self, node: Node) -> None:
        """Forget the failures of a node that has served a sequence to the end."""
        self._failures.pop(node.ref.node_id, None)

    # -------------------------------------------------------------------------------- of sequences
    @property
    def num_trials(self) -> int:
        """Suspects that are tried now."""
        return len(self._trials)

    def tries_on(self, node: Node) -> bool:
        """Whether a suspect is tried on `node`."""
        return any(node in req.attempt.holders for req in self._trials)

    def is_tried(self, req: RunningReq) -> bool:
        """Whether `req` is a suspect that is tried now."""
        return req in self._trials

    def is_alone(self, req: RunningReq) -> bool:
        """Whether the node of a suspect has said that it holds nothing else."""
        return self._trials.get(req, False)

    def try_alone(self, req: RunningReq) -> None:
        """Try a suspect, which is about to be sent."""
        self._trials[req] = False

    def runs_alone(self, req: RunningReq) -> None:
        """Note that the node of a suspect has begun it, and holds nothing else."""
        if req in self._trials:
            self._trials[req] = True

    def end_trial(self, req: RunningReq) -> None:
        """End the trial of `req`, if there is one: it has ended, failed, or been acquitted."""
        self._trials.pop(req, None)
