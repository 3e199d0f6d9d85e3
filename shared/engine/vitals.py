"""What a node publishes about itself: counters, the load that answers every ping, and the audit when it idles."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared import log
from shared.engine.progress import Progress
from shared.kvcache.audit import LeakError, audit_idle
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import Load
from shared.scheduling.req import Req
from shared.scheduling.retraction import RetractionCounts
from shared.timeline import PRIOR_PREFILL_TOKENS_PER_S, PRIOR_TRANSFER_BYTES_PER_S, Clock, MovingRate

THROUGHPUT_WINDOW_S = 1.0
MIN_MEASURED_TOKENS = 64
"""A shorter prefill takes as long as its launch, and tells nothing of a long one."""
MIN_MEASURED_NBYTES = 1 << 20
"""A smaller transfer takes as long as its messages, and tells nothing of a large one."""
MAX_LEAK_CHARS = 300
"""Of the audit's finding, which every Pong repeats; the log has all of it."""


class Vitals:
    """Written by the scheduler thread; `load` may be called by any."""

    def __init__(self, ledger: KVLedger, progress: Progress, clock: Clock) -> None:
        self._ledger = ledger
        self._progress = progress
        self._clock = clock
        self._audited = False
        self._leak = ""
        self._load = Load()
        self._window_start = clock()
        self._window_tokens = 0
        self._gen_throughput = 0.0
        self.num_prompts = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_jumped_tokens = 0
        self.num_fetched_tokens = 0
        self.num_ahead_tokens = 0
        self.num_ahead_evicted_tokens = 0
        self.kv_bytes_transferred = 0
        self.kv_transfer_s = 0.0
        self._transfer_rate = MovingRate(PRIOR_TRANSFER_BYTES_PER_S)
        self.prefill_busy_s = 0.0
        self._prefill_rate = MovingRate(PRIOR_PREFILL_TOKENS_PER_S)

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt, of which `num_cached` tokens came from the RadixCache."""
        self.num_prompts += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached

    def count_generated(self, num_sampled: int, num_jumped: int) -> None:
        """Count committed tokens: sampled, or jumped over where a grammar forced them."""
        self.num_generated_tokens += num_sampled + num_jumped
        self.num_jumped_tokens += num_jumped
        self._window_tokens += num_sampled + num_jumped

    def count_transfer(self, nbytes: int, seconds: float, *, ok: bool = True) -> None:
        """Count a transfer that has ended.

        A large one tells how fast they are here. One that failed tells nothing: it may have waited for a dead peer.
        """
        self.kv_bytes_transferred += nbytes
        self.kv_transfer_s += seconds
        if ok and nbytes >= MIN_MEASURED_NBYTES:
            self._transfer_rate.observe(nbytes, seconds)

    def prefill_s(self, num_tokens: int) -> float:
        """How long this node usually takes to compute so many prompt tokens."""
        return num_tokens / self._prefill_rate.per_second

    def count_prefill(self, num_tokens: int, seconds: float) -> None:
        """Count a forward that had `num_tokens` prompt tokens. A long one tells how fast prefills are here."""
        self.prefill_busy_s += seconds
        if num_tokens >= MIN_MEASURED_TOKENS:
            self._prefill_rate.observe(num_tokens, seconds)

    def publish(self, load: Load, retraction: RetractionCounts, *, idle: bool) -> None:
        """Renew the load after a step: `load` has what the role tells of its requests and links.

        A node that has just become idle is audited: it has no request and no loan.
        """
        now = self._clock()
        elapsed = now - self._window_start
        if elapsed >= THROUGHPUT_WINDOW_S:
            self._gen_throughput = self._window_tokens / elapsed
            self._window_start, self._window_tokens = now, 0
        count, host, windows = self._ledger.count(), self._ledger.host, self._ledger.windows
        self._load = msgspec.structs.replace(
            load,
            num_pages=count.total,
            num_free_pages=count.free,
            num_evictable_pages=count.evictable,
            num_held_pages=count.held + count.protected,
            num_retractions=retraction.num_host + retraction.num_recompute,
            num_cached_tokens=self.num_cached_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_jumped_tokens=self.num_jumped_tokens,
            gen_throughput=self._gen_throughput,
            kv_bytes_transferred=self.kv_bytes_transferred,
            kv_transfer_s=self.kv_transfer_s,
            num_links=len(load.links),
            leak=self._leak,
            num_retracted=retraction.num_retracted,
            num_retractions_host=retraction.num_host,
            num_retractions_recompute=retraction.num_recompute,
            num_retraction_waits=retraction.num_waits,
            num_host_pages=host.num_pages,
            num_free_host_pages=host.num_free,
            prefill_busy_s=self.prefill_busy_s,
            prefill_tokens_per_s=self._prefill_rate.measured,
            num_fetched_tokens=self.num_fetched_tokens,
            num_ahead_tokens=self.num_ahead_tokens,
            num_ahead_evicted_tokens=self.num_ahead_evicted_tokens,
            num_prompts=self.num_prompts,
            kv_bytes_per_s=self._transfer_rate.measured,
            num_window_pages=0 if windows is None else windows.allocator.num_pages,
            num_available_window_pages=0 if windows is None else windows.num_available,
        )
        if not idle:
            self._audited = False
        elif not self._audited:
            self._audited = True
            self._audit()

    def _audit(self) -> None:
        try:
            audit_idle(self._ledger)
        except LeakError as error:
            self._leak = str(error)[:MAX_LEAK_CHARS]  # routers drain the node, and its streams go on
            log.crash("leak")

    @property
    def published(self) -> Load:
        """The node's state after the last step, of the scheduler thread alone: without live progress."""
        return self._load

    def load(self) -> Load:
        """The node's state after the last step, with live progress."""
        return msgspec.structs.replace(self._load, progress=self._progress.count)


class QueuedTokens:
    """Prompt tokens of this node's requests whose KV is not there yet, from their arrival on.

    What the RadixCache holds of a prompt is looked up when the request is added.
    """

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._ends: dict[Req, tuple[int, int]] = {}
        """The length of each prompt that is not computed, and how many of its tokens are counted."""
        self.total = 0

    def add(self, req: Req) -> None:
        """Count a request whose prompt is to be computed here, or count it anew as the RadixCache is now."""
        self.remove(req)
        cached = self._ledger.peek_prefix(req.matchable_ids, req.extra_key).num_pages * self._ledger.page_size
        self._ends[req] = len(req.ids), len(req.ids) - cached
        self.total += len(req.ids) - cached

    def computed(self, reqs: Iterable[Req]) -> None:
        """Take note that the KV of these requests has grown."""
        for req in reqs:
            if req in self._ends and req.kv is not None:
                end, counted = self._ends[req]
                left = min(counted, end - req.kv.kv_committed_len)
                self.total -= counted - left
                self._ends[req] = end, left
                if left <= 0:
                    self.remove(req)

    def remove(self, req: Req) -> None:
        """Forget a request that ended."""
        _, counted = self._ends.pop(req, (0, 0))
        self.total -= counted
