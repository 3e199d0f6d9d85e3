"""Plan → run → account, at depth 0 or 1: the part of the loop that both roles share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from shared import log
from shared.engine.debug_checks import LaunchChecks
from shared.engine.forward_stream import (
    ForwardStream,
    GenerationBatchResult,
    failed_launch,
    is_device_lost,
)
from shared.engine.kv_copies import KVCopies, Settled
from shared.engine.model_worker_batch import snapshot
from shared.engine.profiler import Span
from shared.engine.sampling_inputs import CountedRows
from shared.engine.vocab_mask import fill_vocab_mask, must_wait_for_commit
from shared.kvcache.ledger import KVLedger
from shared.scheduling.commit import Committed, commit_result
from shared.scheduling.req import Req
from shared.scheduling.retraction import KVCopy
from shared.scheduling.schedule_batch import ScheduleBatch

MAX_FAILED_IN_A_ROW = 8


@dataclass(slots=True)
class Launched:
    """A forward on the stream, and the decision it came from; `result` is there once it was told to sample."""

    batch: ScheduleBatch
    forwarded: Any = None
    result: GenerationBatchResult | None = None


class Launcher:
    """Turns decisions into forwards and forwards into committed tokens, and tells the allocator of both.

    With overlap one forward is in flight: a turn launches the next one before it accounts for that. Sampling under
    a grammar needs the token before on the host, so it is delayed until that is accounted for; the forward is not.
    """

    def __init__(
        self,
        stream: ForwardStream,
        ledger: KVLedger,
        eos_token_ids: frozenset[int],
        *,
        overlap: bool,
        span: Span = nullcontext,
        debug_checks: bool = False,
    ) -> None:
        self._stream = stream
        self._ledger = ledger
        self._eos_token_ids = eos_token_ids
        self._overlap = overlap
        self._span = span
        self._future_writes: dict[int, int] = {}
        self._counted_rows = CountedRows()
        self._copies = KVCopies(stream, ledger)
        self._checks = LaunchChecks() if debug_checks else None
        self._num_failed = 0
        self.in_flight: Launched | None = None

    def write_future(self, row: int, token_id: int) -> None:
        """The next forward finds `token_id` as the last token of `row`; it was not sampled here, or not last."""
        self._future_writes[row] = token_id

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around every decision that is given to `turn`."""
        with self._span("plan"), self._checks.planning() if self._checks is not None else nullcontext():
            yield

    def turn(self, batch: ScheduleBatch | None, copies: Sequence[KVCopy] = ()) -> tuple[Committed, list[Req]]:
        """Launch a decision, and account for the forward that is due: the one before, or without overlap this one.

        `copies` go ahead of it. Returns what that forward brought, with the copies that were ahead of it, and the
        requests that they failed.
        """
        with self._span("launch"):
            self._copies.launch(copies)
            launched = self._launch(batch)
            if launched is not None:
                self._copies.forward_launched()
            if launched is not None and not must_wait_for_commit(launched.batch):
                self._sample(launched)
        due, self.in_flight = (self.in_flight, launched) if self._overlap else (launched, None)
        with self._span("commit"):
            outcome = self._commit_with_copies(due)
            if launched is None:  # nothing may follow for long
                _add(self._copies.settle_latest(), outcome)
        if launched is not None and launched.result is None:
            with self._span("mask"):
                self._sample(launched)
        return outcome

    def close(self) -> None:
        """Wait for what is in flight. Its requests have ended, so nothing is left of it."""
        self.turn(None)

    def _launch(self, batch: ScheduleBatch | None) -> Launched | None:
        if batch is None:
            return None
        self._ledger.allocator.forward_launched()
        try:
            inputs = snapshot(
                batch,
                self._ledger.rows,
                tuple(self._future_writes.items()),
                self._eos_token_ids,
                self._counted_rows,
            )
            if self._checks is not None:
                self._checks.launching(batch, inputs)
            forwarded = self._stream.submit(inputs)
        except Exception as error:
            if self._checks is not None and isinstance(error, AssertionError):
                raise  # a failed check of --debug-checks ends the node
            return Launched(batch, result=failed_launch(self._stream, error))  # `_commit` fails its requests
        self._future_writes.clear()
        return Launched(batch, forwarded)

    def _sample(self, launched: Launched) -> None:
        """Queue the sampling of what was launched last, under the grammars of its requests."""
        if launched.result is not None:
            return  # not even launched
        try:
            launched.result = self._stream.sample(launched.forwarded, fill_vocab_mask(launched.batch))
        except Exception as error:
            launched.result = failed_launch(self._stream, error)

    def _commit_with_copies(self, launched: Launched | None) -> tuple[Committed, list[Req]]:
        if launched is None:
            return Committed(), []
        settled = self._copies.settle_ahead()
        outcome = self._commit(launched)
        _add(settled, outcome)
        return outcome

    def _commit(self, launched: Launched) -> tuple[Committed, list[Req]]:
        """A forward that raises fails its own requests, not the node.

        A lost device, or several failures in a row, end the node with that error, for a supervisor to restart it.
        """
        assert launched.result is not None, "a turn leaves nothing behind that does not sample"
        if self._checks is not None:
            self._checks.waiting()
        try:
            sampled = launched.result.wait()
        except Exception as error:
            self._num_failed += 1
            if is_device_lost(error) or self._num_failed == MAX_FAILED_IN_A_ROW:
                raise
            log.crash("forward_failed", requests=len(launched.batch.items), extend=launched.batch.is_extend)
            return Committed(), [item.req for item in launched.batch.items if not item.is_stale]
        finally:
            self._ledger.allocator.forward_retired()
        self._num_failed = 0
        return commit_result(launched.batch, sampled, self._ledger, self._eos_token_ids), []


def _add(settled: Settled, outcome: tuple[Committed, list[Req]]) -> None:
    committed, failed = outcome
    committed.copied += settled.copied
    failed += settled.failed
