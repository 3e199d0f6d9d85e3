"""In-batch prefix caching: of several requests that share a prefix nobody has computed yet, one computes it.

The RadixCache learns of a prefix when its KV is computed. Whoever is admitted before that computes it once more, so a
request (a follower) waits while another (its leader) computes enough of what it lacks: a forward, or the chunks that
are left of the prefix.

SGLang does this under lpm and dfs-weight, among the requests that wait (`schedule_policy.py`). Here the policy does
not matter, and leaders are those whose prefix is being computed: in the batch that is being made, or in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.cached_prefixes import CachedPrefixes
from shared.scheduling.priority import PriorityRule
from shared.scheduling.req import Req


class InBatchPrefix:
    """Who had better wait for a prefix. Remembers nothing: if a leader ends early, the next decision knows.

    Nobody waits here for ever. A leader counts no less than its follower (`PriorityRule.level`), so once the
    follower has aged it waits for nobody who came later, and those who came before it come to an end. Retracted
    requests wait for nobody: they resume first come first served.
    """

    def __init__(
        self, ledger: KVLedger, options: ScheduleOptions, priority: PriorityRule, cached: CachedPrefixes
    ) -> None:
        self._level = priority.level
        self._cached = cached
        self._enabled = ledger.keep_prefixes
        self._page_size = ledger.page_size
        self._worth_tokens = ledger.page_size * ledger.pages_for(
            options.in_batch_prefix_caching_deprioritize_threshold
        )

    def shared_tokens(self, req: Req, leaders: Iterable[Req], step: int) -> int:
        """Tokens of the prefix that `req` had better wait for; 0 when it had better go on by itself.

        Whole pages, cached or not, that one of `leaders`, who are being computed, has in common with it. Costs a
        comparison of few tokens for a leader that adds nothing to what `req` lacks, and O(shared tokens) for one that
        does.
        """
        if not self._enabled or req.num_retractions or len(req.matchable_ids) <= self._worth_tokens:
            return 0
        level = self._level(req, step)
        shared = max(
            (
                _shared_pages(other.ids, req.matchable_ids, self._page_size) * self._page_size
                for other in leaders
                if self._adds_enough(other, req) and self._level(other, step) >= level
            ),
            default=0,
        )
        return shared if shared and shared - self._cached.num_tokens(req) >= self._worth_tokens else 0

    def _adds_enough(self, other: Req, req: Req) -> bool:
        # What `other` adds to the RadixCache begins where its own committed KV ends; what comes before is cached
        # for both. Many who share a system prompt that has long been cached are told apart here.
        committed = other.kv.kv_committed_len if other.kv else 0
        begin = committed // self._page_size * self._page_size
        end = begin + self._worth_tokens
        ids = req.matchable_ids
        return end < len(ids) and other.extra_key == req.extra_key and other.ids[begin:end] == ids[begin:end]


def _shared_pages(theirs: Sequence[int], ids: Sequence[int], page_size: int) -> int:
    """Whole pages with which both begin, without the last of `ids`: found by halving."""
    least, most = 0, min(len(theirs), len(ids) - 1) // page_size
    while least < most:
        middle = (least + most + 1) // 2
        begin, end = least * page_size, middle * page_size
        if theirs[begin:end] == ids[begin:end]:
            least = middle
        else:
            most = middle - 1
    return least
