"""Copies of retracted KV on the forward stream: launched between two forwards, settled between the two commits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shared import log
from shared.engine.forward_stream import CopyResult, ForwardStream, failed_launch, is_device_lost
from shared.errors import RequestError
from shared.kvcache.ledger import KVLedger
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import KVCopy


class KVCopies:
    """Keeps the copies in launch order, so that each retires its epoch before the forward behind it does."""

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
