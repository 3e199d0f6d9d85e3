"""Which running request is retracted next, and what becomes of its KV. Decisions only; `Retraction` carries them out.

Victims are those with the fewest output tokens, then with the longest prompt, then with the smallest key; where
priorities count, the lowest level goes first. What becomes of a victim:

    HOST        its committed KV is copied to host memory and its pages are released; it resumes by copying back what
                the RadixCache has lost meanwhile, and goes on decoding
    RECOMPUTE   its pages are released; it is prefilled again, except for what the RadixCache has kept
    WAIT        it keeps its KV and sits this decode step out

Before pages are short, a victim may leave for another node, if that is estimated to cost less than HOST and RECOMPUTE
(`is_cheaper_to_move`). A router decides whether it does.

`--retract-policy recompute` knows no HOST. `host` recomputes only where nothing else helps: while the host pool is
full, requests wait in place as long as another one can go on. `auto` takes the cheaper of HOST and RECOMPUTE (see
`RetractCosts`), and RECOMPUTE when the host pool is full. Under every policy, requests wait in place when enough
pages come home with the forward that is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import PriorityRule
from shared.timeline import PRIOR_PREFILL_TOKENS_PER_S, PRIOR_TRANSFER_BYTES_PER_S, MovingRate

PRIOR_COPY_BYTES_PER_S = 4e9


class RetractMode(Enum):
    """What becomes of a victim's KV, as the head of this file says."""

    HOST = auto()
    RECOMPUTE = auto()
    WAIT = auto()


class RetractCosts:
    """Estimated seconds of HOST and RECOMPUTE for one victim. Reads no clock: measurements come in with outcomes."""

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self.prefill = MovingRate(PRIOR_PREFILL_TOKENS_PER_S)
        """Tokens a second of this node's own prefills."""
        self.copy = MovingRate(PRIOR_COPY_BYTES_PER_S)
        """Bytes a second between the device and the host."""
        self.transfer = MovingRate(PRIOR_TRANSFER_BYTES_PER_S)
        """Bytes a second between this node and others."""

    def observe_copy(self, num_pages: int, seconds: float) -> None:
        """Pages were copied out, or back."""
        self.copy.observe(num_pages * self._page_nbytes, seconds)

    def host_s(self, num_pages_out: int, num_pages_back: int) -> float:
        """Copy pages to the host now, and later copy back those that are lost here meanwhile."""
        return (num_pages_out + num_pages_back) * self._page_nbytes / self.copy.per_second

    def move_s(self, num_pages: int) -> float:
        """Send pages to another node."""
        return num_pages * self._page_nbytes / self.transfer.per_second

    def recompute_s(self, num_tokens: int) -> float:
        """Prefill the tokens that the RadixCache will not have."""
        return num_tokens / self.prefill.per_second


class Victims:
    """Chooses among running requests. `step` is the number of forwards decided on so far."""

    def __init__(self, ledger: KVLedger, options: ScheduleOptions, priority: PriorityRule) -> None:
        self._ledger = ledger
        self._policy = options.retract_policy
        self._priority = priority
        self.costs = RetractCosts(ledger.host.page_nbytes)

    def in_order(self, running: Sequence[Req], step: int) -> list[Req]:
        """The next victim first: it loses least."""
        counts = self._priority.enabled

        def key(req: Req) -> tuple[int, int, int, str]:
            level = self._priority.level(req, step) if counts else 0
            return level, req.output_len, -req.num_input_ids, str(req.key)

        return sorted(running, key=key)

    def mode_of(self, victim: Req) -> RetractMode:
        """What the policy prefers for the KV of `victim`, which runs."""
        if victim.host_pages:
            return RetractMode.HOST  # not landed yet since it was last retracted: the host has it all
        kv, ledger = victim.kv, self._ledger
        assert kv is not None
        num_pages = ledger.pages_for(len(victim.ids) - 1)
        has_room = num_pages <= ledger.host.num_free
        if self._policy == "recompute" or (self._policy == "auto" and not has_room):
            return RetractMode.RECOMPUTE
        if not num_pages:  # a prompt of one token, which is not committed: there is nothing to copy
            return RetractMode.RECOMPUTE
        if self._policy == "auto":
            recompute_s, host_s = self._estimates(victim, kv, num_pages)
            if recompute_s <= host_s:
                return RetractMode.RECOMPUTE
        # What is not whole now may be committed one step later.
        is_whole = kv.kv_committed_len == len(victim.ids) - 1
        return RetractMode.HOST if has_room and is_whole else RetractMode.WAIT

    def is_cheaper_to_move(self, victim: Req) -> bool:
        """Whether sending the KV of `victim`, which runs, to another node costs less than to give it up here.

        Only under `auto`: the other policies say what becomes of every victim.
        """
        kv = victim.kv
        if self._policy != "auto" or kv is None or victim.host_pages:
            return False
        num_pages = self._ledger.pages_for(len(victim.ids) - 1)
        recompute_s, host_s = self._estimates(victim, kv, num_pages)
        here_s = min(recompute_s, host_s) if num_pages <= self._ledger.host.num_free else recompute_s
        return self.costs.move_s(num_pages) < here_s

    def _estimates(self, victim: Req, kv: ReqKV, num_pages: int) -> tuple[float, float]:
        """Seconds of RECOMPUTE and of HOST. What others keep here costs neither."""
        num_shared = kv.num_pages - self._ledger.num_pages_released_by([kv])
        lost_tokens = len(victim.ids) - num_shared * self._ledger.page_size
        return self.costs.recompute_s(lost_tokens), self.costs.host_s(num_pages, num_pages - num_shared)
