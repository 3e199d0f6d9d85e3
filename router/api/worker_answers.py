"""What a worker does when the parent or another worker asks it to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.bus.metrics_of_workers import packed
from router.bus.worker_messages import (
    AbortReqs,
    Answer,
    Changed,
    DialNode,
    DrainNode,
    MetricFamilies,
    NotDone,
    NumAborted,
    Proof,
    Prove,
    Question,
    TellMetrics,
)
from router.dispatch.metrics import Metrics
from router.nodes.fleet_changes import ADD_WAIT_S, FleetChanges
from router.request.generation import Generator
from shared.errors import RequestError
from shared.log import crash

ABORTED = "aborted by /abort_request"

ProveIt = Callable[[str, int], Awaitable[str]]


class WorkerAnswers:
    """Over the parts of one router."""

    def __init__(
        self,
        *,
        generator: Generator,
        metrics: Metrics,
        changes: FleetChanges,
        prove: ProveIt,
    ) -> None:
        self._generator = generator
        self._metrics = metrics
        self._changes = changes
        self._prove = prove

    async def answer(self, question: Question) -> Answer:
        """The answer; NotDone says why there is no other."""
        try:
            return await self._answer(question)
        except RequestError as e:
            return NotDone(e.message)
        except Exception:
            crash("answer_failed", question=type(question).__name__)
            return NotDone("internal error")

    async def _answer(self, question: Question) -> Answer:
        match question:
            case AbortReqs(rid):
                return NumAborted(self._generator.abort(rid, ABORTED))
            case TellMetrics():
                return MetricFamilies(packed(self._metrics.own()))
            case DialNode(role, address):
                await self._changes.add(role, address, ADD_WAIT_S, keep=True)
                return Changed()
            case DrainNode(address, incarnation, drain_timeout_s):
                if incarnation:
                    self._changes.turn_away(incarnation)  # it may announce itself here yet
                member = self._changes.find(address)
                if member is None:
                    return Changed()  # it never got here
                return Changed((await self._changes.remove(member, drain_timeout_s)).num_ended)
            case Prove(prompt, max_new_tokens):
                return Proof(await self._prove(prompt, max_new_tokens))
