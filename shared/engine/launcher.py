"""Runs plans and accounts for them, at depth 0 or 1."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from shared import log
from shared.engine.debug_checks import LaunchChecks, check_windows
from shared.engine.forward_stream import (
    CopyResult,
    ForwardStream,
    GenerationBatchResult,
    failed_launch,
    is_device_lost,
)
from shared.engine.model_worker_batch import CountedRows, Snapshot, snapshot
from shared.engine.profiler import Span
from shared.engine.sampling_inputs import fill_vocab_mask, must_wait_for_commit
from shared.errors import RequestError
from shared.kvcache.ledger import KVLedger
from shared.scheduling.commit import Outcome, commit_result
from shared.scheduling.grammar_queue import grammar_error
from shared.scheduling.plan import KVCopy, Plan, ScheduleBatch
from shared.timeline import Clock

MAX_FAILED_IN_A_ROW = 8


@dataclass(slots=True)
class Launched:
    """A forward on the stream, and the decision it came from; `result` is there once it was told to sample."""

    batch: ScheduleBatch
    began_at: float
    """When it was launched, or when the forward before it was done."""
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
        clock: Clock = time.monotonic,
        span: Span = nullcontext,
        debug_checks: bool = False,
        snapshot: Snapshot = snapshot,
    ) -> None:
        self._stream = stream
        self._ledger = ledger
        self._eos_token_ids = eos_token_ids
        self._overlap = overlap
        self._clock = clock
        self._span = span
        self._snapshot = snapshot
        self._counted_rows = CountedRows()
        self._copies = KVCopies(stream, ledger)
        self._checks = LaunchChecks() if debug_checks else None
        self._num_failed = 0
        self.in_flight: Launched | None = None

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Surrounds each decision: a span in a trace, and the checks of --debug-checks."""
        with self._span("plan"), self._checks.planning() if self._checks is not None else nullcontext():
            yield

    def turn(self, plan: Plan) -> Outcome:
        """Launch a plan, and account for the forward that is due: the one before, or without overlap this one.

        The plan's copies go ahead of its forward; the outcome has those that went ahead of the forward that is due.
        """
        outcome, began_at = Outcome(), self._clock()
        with self._span("launch"):
            self._copies.launch(plan.copies)
            launched = self._launch(plan.batch, began_at) if plan.batch is not None else None
            if launched is not None:
                self._copies.forward_launched()
            if launched is not None and not must_wait_for_commit(launched.batch):
                self._sample(launched)
        due, self.in_flight = (self.in_flight, launched) if self._overlap else (launched, None)
        with self._span("commit"):
            if due is not None:
                self._copies.settle_ahead(outcome)
                self._commit(due, outcome)
                if self.in_flight is not None:
                    self.in_flight.began_at = self._clock()
            self._copies.settle_latest(outcome)
        if launched is not None and launched.result is None:
            with self._span("mask"):
                self._sample(launched)
        for of_turn in filter(None, (due, launched)):
            _add_too_slow(of_turn.batch, outcome)
        outcome.worked = due is not None or launched is not None
        return outcome

    def close(self) -> None:
        """Wait for the forward in flight. Its requests have ended, so its results are dropped."""
        self.turn(Plan())

    def _launch(self, batch: ScheduleBatch, began_at: float) -> Launched:
        launched = Launched(batch, began_at)
        self._ledger.forward_launched()
        try:
            inputs = self._snapshot(
                batch,
                self._ledger.rows,
                batch.future_writes,
                self._eos_token_ids,
                self._counted_rows,
                self._ledger.windows,
            )
            if self._checks is not None:
                self._checks.launching(batch, inputs)
                check_windows(inputs, self._ledger.windows)
            launched.forwarded = self._stream.submit(inputs)
        except Exception as error:
            if self._checks is not None and isinstance(error, AssertionError):
                raise  # a failed check of --debug-checks ends the node
            launched.result = failed_launch(self._stream, error)  # `_commit` fails its requests
        return launched

    def _sample(self, launched: Launched) -> None:
        """Queue the sampling of what was launched last, under the grammars of its requests."""
        if launched.result is not None:
            return  # not even launched
        try:
            launched.result = self._stream.sample(launched.forwarded, fill_vocab_mask(launched.batch))
        except Exception as error:
            launched.result = failed_launch(self._stream, error)

    def _commit(self, due: Launched, outcome: Outcome) -> None:
        """A forward that raises fails its own requests, not the node.

        A lost device, or several failures in a row, end the node with that error, for a supervisor to restart it.
        """
        assert due.result is not None, "a turn leaves nothing behind that does not sample"
        if self._checks is not None:
            self._checks.waiting()
        try:
            sampled = due.result.wait()
        except Exception as error:
            self._num_failed += 1
            if is_device_lost(error) or self._num_failed == MAX_FAILED_IN_A_ROW:
                raise
            keys = ",".join(str(item.req.key) for item in due.batch.items)
            log.crash("forward_failed", keys=keys, extend=due.batch.is_extend)
            failure = RequestError("the forward of this request failed", status=500)
            outcome.failed |= {item.req: failure for item in due.batch.items if not item.is_stale}
            return
        finally:
            self._ledger.forward_retired()
        self._num_failed = 0
        if any(item.start < item.req.num_input_ids for item in due.batch.extends):
            outcome.prefilled = due.batch.num_tokens, self._clock() - due.began_at
        commit_result(due.batch, sampled, self._ledger, self._eos_token_ids, outcome)


def _add_too_slow(batch: ScheduleBatch, outcome: Outcome) -> None:
    """Fail the requests whose grammars have used up their CPU time: a measurement, which no decision waits for."""
    for item in batch.items:
        grammar = item.req.grammar
        if grammar is not None and grammar.is_too_slow and item.req.finish is None:
            outcome.failed.setdefault(item.req, grammar_error(item.req))


class KVCopies:
    """Copies of retracted KV on the forward stream: launched between two forwards, settled between the two commits.

    They are kept in launch order, so that each retires its epoch before the forward behind it does.
    """

    def __init__(self, stream: ForwardStream, ledger: KVLedger) -> None:
        self._stream = stream
        self._ledger = ledger
        self._latest: list[tuple[KVCopy, CopyResult]] = []
        """Launched behind the latest forward."""
        self._ahead_of: deque[list[tuple[KVCopy, CopyResult]]] = deque()
        """For each forward in flight, those launched between it and the one before."""

    def launch(self, copies: Sequence[KVCopy]) -> None:
        """Queue copies behind all forwards launched so far; the plan has announced them to the allocator."""
        for copy in copies:
            try:
                result: CopyResult = self._stream.copy(copy.pages)
            except Exception as error:
                result = failed_launch(self._stream, error)
            self._latest.append((copy, result))

    def forward_launched(self) -> None:
        """Note that a forward is behind the latest copies."""
        self._ahead_of.append(self._latest)
        self._latest = []

    def settle_ahead(self, outcome: Outcome) -> None:
        """Account for the copies ahead of the oldest forward in flight, before that is accounted for."""
        self._settle(self._ahead_of.popleft(), outcome)

    def settle_latest(self, outcome: Outcome) -> None:
        """Account for copies with no forward behind them, since the next forward may be far away."""
        latest, self._latest = self._latest, []
        self._settle(latest, outcome)

    def _settle(self, copies: Sequence[tuple[KVCopy, CopyResult]], outcome: Outcome) -> None:
        """A copy that fails fails its request alone, and what later forwards made of it is dropped.

        A lost device ends the node with its error.
        """
        for copy, result in copies:
            try:
                outcome.copied.append((copy, result.wait()))
            except Exception as error:
                if is_device_lost(error):
                    raise
                log.crash("kv_copy_failed", **copy.req.fields, to_host=copy.pages.to_host)
                if copy.req.finish is None and copy.req not in outcome.failed:
                    copy.req.drop_results_in_flight()
                    failure = RequestError(
                        "this request failed: a copy of its KV did not succeed", status=500
                    )
                    outcome.failed[copy.req] = failure
            finally:
                self._ledger.forward_retired()
