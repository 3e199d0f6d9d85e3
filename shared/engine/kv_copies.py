"""Copies of retracted requests' KV on the forward stream: launched between two forwards, settled between the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared import log
from shared.engine.forward_stream import CopyResult, ForwardStream, failed_launch, is_device_lost
from shared.kvcache.ledger import KVLedger
from shared.scheduling.req import Req
from shared.scheduling.retraction import KVCopy


@dataclass(slots=True)
class Settled:
    """Copies that are done, with the seconds each took, and the requests whose copies failed."""

    copied: list[tuple[KVCopy, float]] = field(default_factory=list)
    failed: list[Req] = field(default_factory=list)


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
        """A forward is behind them now."""
        self._ahead_of.append(self._latest)
        self._latest = []

    def settle_ahead(self) -> Settled:
        """Account for the copies ahead of the oldest forward in flight, before that is accounted for."""
        return self._settle(self._ahead_of.popleft())

    def settle_latest(self) -> Settled:
        """Account for copies with no forward behind them; every forward is accounted for."""
        latest, self._latest = self._latest, []
        return self._settle(latest)

    def _settle(self, copies: Sequence[tuple[KVCopy, CopyResult]]) -> Settled:
        """A copy that fails fails its request alone, and what later forwards made of it is dropped.

        A lost device ends the node with its error.
        """
        settled = Settled()
        for copy, result in copies:
            try:
                settled.copied.append((copy, result.wait()))
            except Exception as error:
                if is_device_lost(error):
                    raise
                log.crash("kv_copy_failed", key=copy.req.key, to_host=copy.pages.to_host)
                if copy.req.finish is None and copy.req not in settled.failed:
                    copy.req.drop_results_in_flight()
                    settled.failed.append(copy.req)
            finally:
                self._ledger.allocator.forward_retired()
        return settled
