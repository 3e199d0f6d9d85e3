"""In-batch prefix caching: of several requests that share a prefix nobody has computed yet, one computes it.

As in SGLang's scheduler (`schedule_policy.py`), where the tree is called the simulated radix tree of the waiting
queue: it holds prefixes that are about to be computed, while the real one holds those that are.
"""

from __future__ import annotations

from shared.config import ScheduleOptions
from shared.kvcache.radix_cache import RadixCache
from shared.scheduling.req import Req


class WaitingPrefixes:
    """The prefixes that will be cached soon. Lives for one round of the waiting queue.

    Nobody can wait here for ever. Whoever is announced is being computed (chunked or in flight), or is offered to
    the PrefillAdder earlier in this very round; if it does not fit, nobody behind it is offered anything, as
    without this class. The next round begins anew, without those who ended meanwhile.
    """

    def __init__(self, page_size: int, options: ScheduleOptions) -> None:
        self._page_size = page_size
        self._check = options.in_batch_prefix_check_threshold
        self._deprioritize = options.in_batch_prefix_deprioritize_threshold
        # Whoever is checked has at most `_check` tokens cached, so deeper pages decide nothing.
        self._depth = -(-(self._check + self._deprioritize) // page_size) * page_size
        self._tree = RadixCache(page_size)

    def announce(self, req: Req, num_cached_tokens: int = 0) -> None:
        """The prefix of `req` will be computed, but for what is cached."""
        if num_cached_tokens >= self._depth:
            return  # whoever shares of it what is looked at here, has it cached as well
        num_pages = min(len(req.ids), self._depth) // self._page_size
        self._tree.insert(req.ids[: num_pages * self._page_size], range(num_pages), req.extra_key)

    def is_worth_waiting(self, req: Req, num_cached_tokens: int) -> bool:
        """Whether enough of what `req` lacks has been announced by another."""
        if num_cached_tokens > self._check:
            return False
        ids = req.matchable_ids
        announced = self._tree.peek(ids, min(len(ids) - 1, self._depth), req.extra_key)
        return announced.num_pages * self._page_size - num_cached_tokens >= self._deprioritize
