"""Plan → run → account, at depth 0 or 1: the part of the loop that both roles share."""

from __future__ import annotations

from dataclasses import dataclass

from shared import log
from shared.engine.forward_stream import ForwardStream, GenerationBatchResult
from shared.engine.model_worker_batch import snapshot
from shared.kvcache.ledger import KVLedger
from shared.scheduling.commit import Committed, commit_result
from shared.scheduling.req import Req
from shared.scheduling.sampled import Sampled
from shared.scheduling.schedule_batch import ScheduleBatch

MAX_FAILED_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """The result of a forward that could not even be launched."""

    error: Exception

    def wait(self) -> Sampled:
        """See GenerationBatchResult."""
        raise self.error


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward on the stream that will sample, and the decision it came from."""

    batch: ScheduleBatch
    result: GenerationBatchResult


class Launcher:
    """Turns decisions into forwards and forwards into committed tokens, and tells the allocator of both.

    With overlap one forward is in flight: a turn launches the next one before it accounts for that.
    """

    def __init__(
        self, stream: ForwardStream, ledger: KVLedger, eos_token_ids: frozenset[int], *, overlap: bool
    ) -> None:
        self._stream = stream
        self._ledger = ledger
        self._eos_token_ids = eos_token_ids
        self._overlap = overlap
        self._future_writes: dict[int, int] = {}
        self._num_failed = 0
        self.in_flight: Launched | None = None

    def write_future(self, row: int, token_id: int) -> None:
        """The next forward finds `token_id` as the last token of `row`; it came from a prefill node."""
        self._future_writes[row] = token_id

    def turn(self, batch: ScheduleBatch | None) -> tuple[Committed, list[Req]]:
        """Launch a decision, and account for the forward that is due: the one before, or without overlap this one.

        Returns what that forward brought, and the requests that it failed.
        """
        launched = self._launch(batch)
        due, self.in_flight = (self.in_flight, launched) if self._overlap else (launched, None)
        return self._commit(due)

    def _launch(self, batch: ScheduleBatch | None) -> Launched | None:
        if batch is None:
            return None
        self._ledger.allocator.forward_launched()
        try:
            inputs = snapshot(
                batch, self._ledger.rows, tuple(self._future_writes.items()), self._eos_token_ids
            )
            result = self._stream.sample(self._stream.submit(inputs))
        except Exception as error:
            return Launched(batch, FailedLaunch(error))  # `_commit` fails its requests
        self._future_writes.clear()
        return Launched(batch, result)

    def _commit(self, launched: Launched | None) -> tuple[Committed, list[Req]]:
        """A forward that raises fails its own requests, not the node.

        Several in a row mean that the device is broken; then the error ends the node, so that somebody restarts it.
        """
        if launched is None:
            return Committed(), []
        try:
            sampled = launched.result.wait()
        except Exception:
            self._num_failed += 1
            if self._num_failed == MAX_FAILED_IN_A_ROW:
                raise
            log.crash("forward_failed", requests=len(launched.batch.items), extend=launched.batch.is_extend)
            return Committed(), [item.req for item in launched.batch.items if not item.is_stale]
        finally:
            self._ledger.allocator.forward_retired()
        self._num_failed = 0
        return commit_result(launched.batch, sampled, self._ledger, self._eos_token_ids), []
