"""The budgets of one prefill decision, and the estimates of output behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger, Room
from shared.kvcache.radix_cache import Peek, PrefixLock, TreeNode
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import CachedPrefixes

MAX_RESERVED_OUTPUT = 4096
"""No request reserves room for more output than this, as in SGLang: longer outputs are rare and may be retracted."""

MAX_LOOKUPS = 32
"""Of so many long prompts the cached prefix is looked up, to see what is left of them beside a chunk. The others are
taken for long, since a lookup costs O(prompt length)."""


class AddReqResult(Enum):
    """The result of offering a request to the PrefillAdder."""

    CONTINUE = auto()
    """It was added; there may be room for another."""
    NO_TOKEN = auto()
    """There is no room for it now: no request slot or too few KV pages, besides those kept for other requests."""
    TOO_LONG = auto()
    """It would not fit into this forward as a whole, and another prompt is being computed in chunks."""
    OTHER = auto()
    """The token budget of this forward is used up: chunk tokens, or prefill tokens."""


class PrefillAdder:
    """Fills one extend batch within four budgets: KV pages, chunk tokens, prefill tokens, request slots.

    It lives for one call of `Batcher.plan`. A request is admitted with pages for its whole prompt, so a chunk of it
    can never lack a page later on. Room for output is reserved by an estimate, `new_token_ratio`. The end of a
    request that ignores EOS is known, so such requests are followed to their ends instead (`fits_to_the_end`).
    """

    def __init__(
        self,
        ledger: KVLedger,
        cached: CachedPrefixes,
        options: ScheduleOptions,
        running: Sequence[Req],
        new_token_ratio: float,
        *,
        num_decodes: int = 0,
    ) -> None:
        """The forward has `num_decodes` tokens of a decode step too. At least half of each budget is for prompts."""
        self._ledger = ledger
        self._cached = cached
        self._new_token_ratio = new_token_ratio
        self._known_share = min(options.schedule_conservativeness, 1.0)
        self._running = list(running)
        self._reserved_tokens = sum(self._reserve(req) for req in running)
        has_windows = ledger.windows is not None
        self._reserved_window_pages = sum(map(self._reserve_windows, running)) if has_windows else 0
        self._short_prompt_share = options.short_prompt_share
        self._num_lookups = 0
        self._rem_chunk_tokens = tokens_beside(num_decodes, options.chunk_tokens)
        self._rem_input_tokens = tokens_beside(num_decodes, options.max_prefill_tokens)
        self._num_kept_rows = self._num_kept_pages = 0
        self.can_run: list[Req] = []
        self.chunked_req: Req | None = None
        """The request of which only a part fits into this batch."""

    @property
    def is_full(self) -> bool:
        """True when no waiting request whatsoever could be admitted: each needs a slot, a token and a page."""
        return self.lacks_room or not self._has_tokens

    @property
    def lacks_room(self) -> bool:
        """True when every slot or every page is taken, or kept for a request."""
        return self._num_free_rows <= 0 or self._num_available_pages <= 0

    @property
    def _num_free_rows(self) -> int:
        return self._ledger.rows.num_free - self._num_kept_rows

    @property
    def _num_available_pages(self) -> int:
        return self._ledger.num_available_pages - self._num_kept_pages

    @property
    def _available(self) -> Room:
        return self._ledger.available - Room(self._num_kept_pages, self._num_kept_pages)

    @property
    def _rem_tokens(self) -> int:
        return min(self._rem_chunk_tokens, self._rem_input_tokens)

    @property
    def _has_tokens(self) -> bool:
        return self._rem_tokens > 0

    def would_fit(self, req: Req, victims: Sequence[Req]) -> bool:
        """Whether a waiting request could be admitted if `victims`, which run, were retracted.

        Its cached prefix is looked up anew only when the RadixCache has changed, and does not count as used.
        """
        ledger = self._ledger
        if not self._has_tokens or self._num_free_rows + len(victims) <= 0:
            return False
        prefix = self._cached.peek_to_lock(req)
        lock = ledger.radix_cache.lock(prefix.node)
        try:
            return self._fits(req, lock, prefix, victims)
        finally:
            lock.release()

    def forget(self, victim: Req) -> None:
        """Drop the reservation of a running request that is being retracted."""
        self._running.remove(victim)
        self._reserved_tokens -= self._reserve(victim)
        self._reserved_window_pages -= self._reserve_windows(victim)

    def keep_room_for(self, req: Req, num_shared_tokens: int) -> bool:
        """Keep a row and pages for `req`, which waits for a prefix: a request that passes it must fit beside it.

        Its whole prompt must fit into this batch as well. False when nothing is left for other requests.
        """
        ledger = self._ledger
        num_pages = ledger.pages_for(len(req.ids) + self._reserve(req))
        self._num_kept_rows += 1
        self._num_kept_pages += num_pages - num_shared_tokens // ledger.page_size
        return not self.is_full

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Go on with the request whose last chunk was launched before."""
        return self._take(req)

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request: match its prefix, take a slot and pages, schedule its first chunk."""
        ledger = self._ledger
        if not self._has_tokens:
            return AddReqResult.OTHER
        if self.chunked_req is not None and not self._fits_whole(req):
            return AddReqResult.TOO_LONG
        if not self.would_fit(req, ()):
            return AddReqResult.NO_TOKEN
        kv = ledger.admit(ledger.match_prefix(req.matchable_ids, req.extra_key), req.extra_key)
        assert kv is not None, "a row was free a moment ago"
        grown = ledger.grow(kv, len(req.ids))
        assert grown, "the pages were counted a moment ago"
        req.kv = kv
        if not req.num_retractions:  # what a retracted request finds is its own KV
            found = (
                kv.kv_committed_len if req.ahead_from is None else min(kv.kv_committed_len, req.ahead_from)
            )
            kv.num_found_pages = found // ledger.page_size
            req.cached_tokens = min(found, req.num_input_ids)
        return self._take(req)

    def _take(self, req: Req) -> AddReqResult:
        self._reserved_tokens += self._reserve(req)
        self._reserved_window_pages += self._reserve_windows(req)
        todo, rem_tokens = len(req.ids) - req.kv_len, self._rem_tokens
        self.can_run.append(req)
        if todo <= rem_tokens:
            req.extend_len = todo
        else:
            req.extend_len = rem_tokens - int(rem_tokens * self._short_prompt_share)
            self.chunked_req = req
        self._spend(req.extend_len)
        return (
            AddReqResult.OTHER if req is self.chunked_req and not self._has_tokens else AddReqResult.CONTINUE
        )

    def fill_chunk(self) -> None:
        """Give `chunked_req` the tokens that no shorter prompt has taken. It comes last."""
        if self.chunked_req is not None:
            self.chunked_req.extend_len += self._rem_tokens
            self._spend(self._rem_tokens)

    def _spend(self, num_tokens: int) -> None:
        self._rem_chunk_tokens -= num_tokens
        self._rem_input_tokens -= num_tokens

    def _fits_whole(self, req: Req) -> bool:
        """Whether the rest of this forward is enough for what is not cached of `req`."""
        if len(req.ids) <= self._rem_tokens:
            return True
        self._num_lookups += 1
        return (
            self._num_lookups <= MAX_LOOKUPS
            and len(req.ids) - self._cached.num_tokens(req) <= self._rem_tokens
        )

    def _fits(self, req: Req, lock: PrefixLock, prefix: Peek, victims: Sequence[Req] = ()) -> bool:
        """Whether there are pages for `req`, of which those of `prefix` are cached and held by `lock`.

        `victims` count as if they were gone.
        """
        ledger, num_cached_pages = self._ledger, prefix.num_pages
        todo = len(req.ids) - num_cached_pages * ledger.page_size
        if self._num_kept_rows and todo > self._rem_tokens:
            return False  # its further chunks would delay the requests for which room is kept
        released = [victim.kv for victim in victims if victim.kv is not None]
        room = self._available + ledger.released_by(released)
        if not self._fits_windows(req, prefix, victims, room.window_pages):
            return False
        available = room.pages
        if req.params.ignore_eos:
            available -= ledger.pages_for(len(req.ids)) - num_cached_pages
            return available >= 0 and self._fits_to_the_end(req, lock, num_cached_pages, victims, available)
        missing = ledger.pages_for(len(req.ids) + self._reserve(req)) - num_cached_pages
        reserved = self._reserved_tokens - sum(self._reserve(victim) for victim in victims)
        return missing + ledger.pages_for(reserved) <= available

    def _fits_windows(
        self, req: Req, prefix: Peek, victims: Sequence[Req], num_free_window_pages: int
    ) -> bool:
        """Whether there are window pages for the prompt of `req` as a whole, and for all windows that still grow."""
        ledger = self._ledger
        if ledger.windows is None:
            return True
        reserved = self._reserved_window_pages - sum(map(self._reserve_windows, victims))
        most = ledger.pages_for(len(req.ids) + self._reserve(req))
        own = min(ledger.pages_for(len(req.ids)) + self._reserve_windows(req), most) - prefix.num_pages
        return own + ledger.num_windows_to_protect(prefix) + reserved <= num_free_window_pages

    def _fits_to_the_end(
        self, req: Req, lock: PrefixLock, num_cached_pages: int, victims: Sequence[Req], num_free_pages: int
    ) -> bool:
        """Follow the requests that ignore EOS to their ends; the others keep what is reserved for them."""
        ledger, gone = self._ledger, set(victims)
        own_pages = ledger.pages_for(len(req.ids)) - num_cached_pages
        ends = [self._known_end(req, len(req.ids), own_pages, lock)]
        estimated_tokens = 0
        running = [(other, other.kv_len) for other in self._running if other not in gone]
        for other, kv_len in [*running, *((admitted, len(admitted.ids)) for admitted in self.can_run)]:
            assert other.kv is not None
            if other.params.ignore_eos:
                own_pages = other.kv.num_pages - other.kv.num_tree_pages + len(other.kv.superseded)
                ends.append(self._known_end(other, kv_len, own_pages, other.kv.lock))
            else:
                estimated_tokens += self._reserve(other)
        released = (node for victim in victims if victim.kv for node in victim.kv.lock.nodes())
        free = num_free_pages - ledger.pages_for(estimated_tokens)
        return fits_to_the_end(ends, free, ledger.page_size, released)

    def _known_end(self, req: Req, kv_len: int, own_pages: int, lock: PrefixLock) -> KnownEnd:
        """Where `req`, which has `kv_len` tokens of KV by the next decode step, ends. Its last token needs no KV.

        A conservativeness below 1 admits more than fits, here as elsewhere: that share of the way is followed.
        """
        num_steps = max(req.num_input_ids + req.max_output_len - 1 - kv_len, 0)
        return KnownEnd(kv_len, int(num_steps * self._known_share), own_pages, tuple(lock.nodes()))

    def _reserve(self, req: Req) -> int:
        """Tokens of KV that `req` is expected to need beyond those known; its last token needs none."""
        future = min(req.num_wanted - 1, MAX_RESERVED_OUTPUT)
        return int(max(future, 0) * self._new_token_ratio)

    def _reserve_windows(self, req: Req) -> int:
        """Window pages that `req` is expected to need beyond those of its known tokens."""
        return self._ledger.window_growth(len(req.ids), self._reserve(req))


def tokens_beside(num_decodes: int, budget: int) -> int:
    """The prompt tokens of a budget that a forward with a decode step of so many tokens may have."""
    return budget - min(num_decodes, budget // 2)


INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_LOOKAHEAD_TOKENS = 20


class NewTokenRatio:
    """Share of `max_new_tokens` that admission reserves for each running request; as in SGLang's scheduler.

    It falls a little with every decode step, since most requests stop early, and jumps back when a retraction
    shows that too many were admitted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INIT_RATIO * conservativeness, 1.0)
        self._minimum = min(self._initial * MIN_RATIO_FACTOR, 1.0)
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """Lower the ratio after a decode step."""
        self.value = max(self.value - self._decay, self._minimum)

    def reset(self) -> None:
        """Start again from the initial ratio, since nothing runs."""
        self.value = self._initial

    def rise_after_retraction(self, running: Sequence[Req]) -> None:
        """Reserve as much as the requests left have used so far, and a few tokens more."""
        wanted = sum(req.max_output_len for req in running)
        used = sum(req.num_sampled + RETRACT_LOOKAHEAD_TOKENS for req in running)
        self.value = max(self.value, min(used / max(wanted, 1), 1.0))


@dataclass(frozen=True, slots=True)
class KnownEnd:
    """A request that holds KV of `kv_len` tokens and will compute `num_steps` more, one each decode step.

    When it ends it gives back `own_pages`, what it has grown by, and each of `nodes` that no other request reads.
    """

    kv_len: int
    num_steps: int
    own_pages: int
    nodes: Sequence[TreeNode]


def fits_to_the_end(
    ends: Iterable[KnownEnd], num_free_pages: int, page_size: int, released: Iterable[TreeNode] = ()
) -> bool:
    """Whether every step of all requests finds its pages. Exact but for one step: pages come back one step late.

    The idea of SGLang's `add_one_req_ignore_eos`: a request that ignores EOS ends after `max_new_tokens` and not
    before. What the requests that end sooner give back is there for those that end later.

    `num_free_pages` are the pages that none of them holds yet; `released` names the readers of nodes that are
    about to go, once for each. O(requests * (page_size + depth of the tree)).
    """
    by_end = sorted(ends, key=lambda end: end.num_steps)
    if sum(_grown(end, end.num_steps, page_size) for end in by_end) <= num_free_pages:
        return True  # even if nothing were given back
    readers_gone = Counter(released)
    # How many of those that still run have so many tokens in their last page, less one.
    fill = [0] * page_size
    for end in by_end:
        fill[(end.kv_len - 1) % page_size] += 1
    num_running = len(by_end)
    for num_steps, group in groupby(by_end, key=lambda end: end.num_steps):
        ending = list(group)
        num_running -= len(ending)
        for end in ending:
            fill[(end.kv_len - 1) % page_size] -= 1
        # The result of their last step is still awaited while the others take the next one.
        pages, tokens = divmod(num_steps + 1, page_size)
        needed = sum(_grown(end, num_steps, page_size) for end in ending)
        needed += num_running * pages + sum(fill[page_size - tokens :] if tokens else ())
        if needed > num_free_pages:
            return False
        for end in ending:
            num_free_pages += end.own_pages
            for node in end.nodes:
                readers_gone[node] += 1
                if readers_gone[node] == node.lock_ref:
                    num_free_pages += len(node.pages)
    return True


def _grown(end: KnownEnd, num_steps: int, page_size: int) -> int:
    return -(-(end.kv_len + num_steps) // page_size) - -(-end.kv_len // page_size)
