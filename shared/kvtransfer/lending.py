"""Cached pages that this node lends: another node computes a prompt, and a beginning of it is in the cache here.

    opened      the cached prefix is locked; the borrower has not said Ready
    lending     its pages are offered, and behind the last of them the handoff, which has no new token
    (ended)     the lock is released, and the pages are evictable again

What is cached is looked up by token ids, so that a borrower never gets pages of other tokens, whatever a router
believed that this node holds. Lent pages go behind those of requests: while such pages leave this node, few are
offered in a turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from shared import log
from shared.kvcache.ledger import KVLedger
from shared.kvcache.radix_cache import PrefixLock
from shared.kvtransfer.peering import MAX_UNNAMED_PEERS, Peering
from shared.kvtransfer.queues import offer, record_digest
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.states import SendEnded, SendEvent
from shared.protocol.messages import Lend, ReqKey
from shared.protocol.transfer_messages import Handoff, Ready
from shared.timeline import Clock

MAX_LOANS = 64
"""So many prefixes are lent at a time; a borrower that comes later computes."""
PAGES_BESIDE_HANDOFFS = 32
"""So many pages of a loan are offered in a turn while pages of requests leave this node."""
READY_S = 5.0
"""A borrower asks for its pages at once, or never: then its router has called the request off, say."""
MAX_BORROWERS = 1024
"""So many borrowers are remembered."""
LINK_KEPT_S = 30.0
"""So long after a borrower has asked, its link makes no room for that of another. A link takes long to build, so one
that is closed before its next loan was built in vain: with more borrowers in turn than links, each of them."""


@dataclass(eq=False, slots=True)
class _Loan:
    ids: Sequence[int]
    extra_key: str
    pages: Sequence[int]
    """All that is cached of the sequence."""
    lock: PrefixLock
    began_at: float
    next_page: int = 0
    end_page: int | None = None
    """None until the borrower has said Ready."""
    window_from: int = 0
    """Pages from this one on are lent with their window pages, which are protected."""


class Lending:
    """The loans of this node, by the key of the request for which they are. Used by the scheduler thread."""

    def __init__(self, ledger: KVLedger, sender: KVSender, peering: Peering, clock: Clock) -> None:
        self._ledger = ledger
        self._sender = sender
        self._peering = peering
        self._clock = clock
        self._loans: dict[ReqKey, _Loan] = {}
        self._borrowers: OrderedDict[str, float] = OrderedDict()
        """When each has asked last, the latest one at the end."""

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def offers_more(self) -> bool:
        """Whether the next `advance` has pages to offer."""
        return any(
            loan.end_page is not None and loan.next_page < loan.end_page for loan in self._loans.values()
        )

    def is_borrower(self, incarnation: str) -> bool:
        """Whether this node was asked lately to lend to this one."""
        return incarnation in self._borrowers

    def start(self, message: Lend) -> None:
        """Lend what is cached of a sequence, or only see to a link, if there is room for one more."""
        borrower = message.borrower.incarnation
        if message.work is None and not self._may_link(borrower):
            return
        self._borrowers[borrower] = self._clock()
        self._borrowers.move_to_end(borrower)
        if len(self._borrowers) > MAX_BORROWERS:
            self._borrowers.popitem(last=False)
        self._peering.ensure(message.borrower)
        if message.work is None:
            return
        ids = message.work.input_ids + message.work.output_ids
        cache, extra_key = self._ledger.radix_cache, message.work.extra_key
        match = cache.match_prefix(ids if len(self._loans) < MAX_LOANS else (), extra_key)
        self._loans[message.key] = _Loan(ids, extra_key, match.pages, cache.lock(match.node), self._clock())
        self._sender.open(message.key, borrower)
        if not match.pages:
            self._sender.cancel(message.key, "this node lends none of these pages")

    def _may_link(self, borrower: str) -> bool:
        """Whether `borrower` has asked lately, or a connection to it closes none to one that has."""
        lately = self._clock() - LINK_KEPT_S
        if self._borrowers.get(borrower, lately) > lately:
            return True
        latest = [*islice(reversed(self._borrowers.values()), MAX_UNNAMED_PEERS)]
        return len(latest) < MAX_UNNAMED_PEERS or latest[-1] <= lately

    def hear(self, event: SendEvent) -> bool:
        """Take an event of the sender; False if it is about none of the loans."""
        if event.key not in self._loans:
            return False
        match event:
            case Ready():
                self._ready(event)
            case SendEnded():
                self._ended(event)
        return True

    def _ready(self, ready: Ready) -> None:
        """The borrower has reserved pages."""
        loan = self._loans[ready.key]
        end_page, windows = min(ready.num_pages, len(loan.pages)), self._ledger.windows
        if windows is not None:
            end_page = windows.hit(loan.pages[:end_page])
        if not 0 <= ready.prefix_pages < end_page:
            self._sender.cancel(ready.key, f"this node has cached {len(loan.pages)} pages of it")
            return
        loan.next_page, loan.end_page = ready.prefix_pages, end_page
        if windows is not None:
            loan.window_from = windows.first_page(end_page * self._ledger.page_size)
            windows.read(loan.pages[loan.window_from : end_page])

    def advance(self, *, beside_handoffs: bool) -> None:
        """Offer the next pages of every loan; `beside_handoffs`, while pages of requests leave this node."""
        now = self._clock()
        for key, loan in self._loans.items():
            if loan.end_page is None:
                if now >= loan.began_at + READY_S:
                    self._sender.cancel(
                        key, f"the borrower has not asked for these pages within {READY_S:g} s"
                    )
                continue
            if loan.next_page == loan.end_page:
                continue
            first, loan.next_page = loan.next_page, loan.end_page
            if beside_handoffs:
                loan.next_page = min(first + PAGES_BESIDE_HANDOFFS, loan.end_page)
            pages = loan.pages[first : loan.next_page]
            offer(self._sender, self._ledger, key, pages, max(loan.window_from - first, 0))
            if loan.next_page == loan.end_page:
                self._sender.handoff(key, loan_record(key, loan.ids, loan.end_page, self._ledger.page_size))

    def _ended(self, ended: SendEnded) -> None:
        """Release a loan, whose pages are not read any more. Corrupt pages are evicted, as they may be wrong here."""
        loan = self._loans.pop(ended.key)
        if self._ledger.windows is not None and loan.end_page is not None:
            self._ledger.windows.unread(loan.pages[loan.window_from : loan.end_page])
        loan.lock.release()
        if ended.corrupt:
            num_pages = self._ledger.evict_behind(loan.ids, ended.prefix_pages, loan.extra_key)
            log.warn("corrupt_pages_evicted", **ended.key.fields, pages=num_pages)


def loan_record(key: ReqKey, ids: Sequence[int], num_pages: int, page_size: int) -> Handoff:
    """The record of lent pages: of whole pages, and without a token behind them."""
    kv_len = num_pages * page_size
    digest = record_digest(ids[:kv_len], (), (), kv_len)
    return Handoff(key, num_pages, token_ids=(), kv_len=kv_len, digest=digest, cached_tokens=0, stamps=())
