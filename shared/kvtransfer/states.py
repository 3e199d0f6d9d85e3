"""The life of one transfer on either node, without IO: which side owns its pages, and how it ends exactly once.

    sending node (SendTransfer)                           receiving node (ReceiveTransfer)
    WAITING     opened; no page is read                   RESERVED    opened, Ready not sent; pages belong to the side
       │ Ready                                               │ Ready sent
    OFFERING    offered pages are held; gathers read them RECEIVING   chunks are scattered into the pages
       │ handoff                                             │
    HANDED_OFF  held while the lease lasts                   │
       │ Done, cancel, timeout, link death                   │ complete, cancel, timeout, link death
    ENDED       ────── the terminal event; the caller owns the pages again ──────  ENDED

The first call of `end` decides the outcome. While a gather (scatter) of the transfer still runs on the data
thread, the event is withheld: `take_end` returns it, once, as soon as nothing touches the pages and nothing
ever will. All methods run under the lock of the side that owns the transfer; gathers and scatters run outside
of it, between begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shared.errors import TransferError
from shared.kvtransfer.staging import Chunk
from shared.protocol.messages import ReqKey, first_window_page
from shared.protocol.transfer_messages import Handoff, Ready


@dataclass(frozen=True, slots=True)
class SendEnded:
    """The last event of a key on a sending node: its pages may be freed.

    `seconds` count while offered pages are on their way. In between the next pages are computed.
    """

    key: ReqKey
    ok: bool
    reason: str
    nbytes: int
    seconds: float
    handed_off: bool
    """True when the Handoff was sent: from then on only the receiving node speaks for the request."""
    corrupt: bool = False
    """True when the pages did not match their digests. Then also only the receiving node speaks for the request."""
    prefix_pages: int = 0
    """Pages [0, prefix_pages) of the sequence were not sent, since the receiving node had them."""


READY_OVERDUE_S = 0.1
"""A receiving node that has room says Ready within one or two of its steps."""


@dataclass(frozen=True, slots=True)
class ReadyOverdue:
    """The receiving node has not said Ready for READY_OVERDUE_S: it has no room, or is busy. Told once."""

    key: ReqKey


SendEvent = Ready | ReadyOverdue | SendEnded
"""Ready is the receiving node's message, handed on: how many pages have a place there, and which are there."""


@dataclass(frozen=True, slots=True)
class Received:
    """The sequence is complete on the receiving node. `pages` were transferred, and awaited for `seconds`.

    `sender` is the incarnation of the node that it came from.
    """

    key: ReqKey
    sender: str
    handoff: Handoff
    nbytes: int
    pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The transfer has failed; `by_peer`: the sending node gave it up on purpose."""

    key: ReqKey
    reason: str
    by_peer: bool
    handed_off: bool = False
    """True when the sending node had sent its Handoff: since then only the receiving node speaks for the request."""
    sender: str = ""
    """The sending node, by incarnation."""
    corrupt: bool = False
    """True when its pages did not match their digests."""


ReceiveEvent = Received | ReceiveFailed


class SendState(StrEnum):
    """The states of a SendTransfer, drawn at the head of this file."""

    WAITING = "waiting"
    OFFERING = "offering"
    HANDED_OFF = "handed_off"
    ENDED = "ended"


class ReceiveState(StrEnum):
    """The states of a ReceiveTransfer, drawn at the head of this file."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    ENDED = "ended"


@dataclass(slots=True)
class SendTransfer:
    """One transfer on the sending node. `deadline` is of Ready, later of the lease; none while pages are computed."""

    key: ReqKey
    peer_id: str
    num_layers: int
    opened_at: float
    deadline: float | None
    state: SendState = SendState.WAITING
    prefix_pages: int | None = None
    page_ids: list[int] = field(default_factory=list)
    num_window_layers: int = 0
    window_ids: list[int] = field(default_factory=list)
    """The window page of each of `page_ids`; 0: it is sent without."""
    nbytes: int = 0
    _num_units: int = 0
    _num_offered_units: int = 0
    _overdue: bool = False
    _sends_since: float = 0.0
    """When pages were last offered while all that had been offered before were read."""
    _read_at: float = 0.0
    """When pages were read last; `_sends_since` if none was read since."""
    _seconds: float = 0.0
    """How long pages were on their way before `_sends_since`."""
    _num_gathers: int = 0
    _end: SendEnded | None = None
    _taken: bool = False

    @property
    def ended(self) -> bool:
        """Its outcome is decided."""
        return self.state is SendState.ENDED

    @property
    def num_pages_sent(self) -> int:
        """Pages that have been read in all layers in which they are sent."""
        if self._num_units == self._num_offered_units:
            return len(self.page_ids)
        return min(self._num_units // self.num_layers, len(self.page_ids) - 1)

    def ready(self, prefix_pages: int) -> bool:
        """The receiving node's reservation; False when it is a repetition or comes too late."""
        if self.state is not SendState.WAITING:
            return False
        self.state = SendState.OFFERING
        self.prefix_pages = prefix_pages
        self.deadline = None
        return True

    def becomes_overdue(self, now: float) -> bool:
        """Whether Ready has been awaited for READY_OVERDUE_S by now. True once."""
        was_overdue = self._overdue
        self._overdue |= self.state is SendState.WAITING and now - self.opened_at >= READY_OVERDUE_S
        return self._overdue and not was_overdue

    def offer(self, page_ids: list[int], now: float, window_ids: Sequence[int] = ()) -> int:
        """Hold these pages, the next of the sequence; returns the sequence index of the first.

        Without `window_ids` they are sent in the layers without windows alone.
        """
        assert len(window_ids) in (0, len(page_ids)) and all(window_ids), "pages that lack window pages"
        assert self.state is SendState.OFFERING and self.prefix_pages is not None, f"offer while {self.state}"
        first = self.prefix_pages + len(self.page_ids)
        if self.num_pages_sent == len(self.page_ids):
            self._seconds += self._read_at - self._sends_since
            self._sends_since = self._read_at = now
        self.page_ids.extend(page_ids)
        self.window_ids.extend(window_ids or [0] * len(page_ids))
        num_layers = self.num_layers - (0 if window_ids else self.num_window_layers)
        self._num_offered_units += len(page_ids) * num_layers
        return first

    def handoff(self, total_pages: int, lease_until: float) -> None:
        """Everything is offered; from here on the pages are held for the receiving node alone."""
        assert self.state is SendState.OFFERING and self.prefix_pages is not None, (
            f"handoff while {self.state}"
        )
        offered = self.prefix_pages + len(self.page_ids)
        assert total_pages == offered, f"handoff of {total_pages} pages after {offered}"
        self.state = SendState.HANDED_OFF
        self.deadline = lease_until

    def renew(self, lease_until: float) -> None:
        """The receiving node still wants the pages."""
        if self.state is SendState.HANDED_OFF:
            self.deadline = lease_until

    def begin_gather(self, chunk: Chunk) -> list[int] | None:
        """Pages to read, or None when the chunk is void: the transfer has ended, or never offered these pages."""
        if self.state is SendState.ENDED or self.prefix_pages is None:
            return None
        first = chunk.first_page - self.prefix_pages
        if first < 0 or first + chunk.num_pages > len(self.page_ids):
            return None
        of_windows = chunk.first_layer >= self.num_layers - self.num_window_layers
        page_ids = (self.window_ids if of_windows else self.page_ids)[first : first + chunk.num_pages]
        if not all(page_ids):
            return None
        self._num_gathers += 1
        return page_ids

    def end_gather(self, chunk: Chunk, nbytes: int, now: float) -> None:
        """The data thread no longer reads the pages that `begin_gather` named."""
        self._num_gathers -= 1
        self._num_units += chunk.units
        self.nbytes += nbytes
        self._read_at = now

    def end(self, *, ok: bool, reason: str, now: float, corrupt: bool = False) -> bool:
        """Decide the outcome; False when it had been decided before.

        When it is `ok`, the last pages have arrived by `now`. Their reading had ended before, in a slot of the link.
        """
        if self.state is SendState.ENDED:
            return False
        handed_off = self.state is SendState.HANDED_OFF
        self.state = SendState.ENDED
        awaits_pages = ok or self.num_pages_sent < len(self.page_ids)
        until = now if awaits_pages else self._read_at
        seconds = self._seconds + (until - self._sends_since if self.page_ids else 0.0)
        self._end = SendEnded(self.key, ok, reason, 0, seconds, handed_off, corrupt, self.prefix_pages or 0)
        return True

    def take_end(self) -> SendEnded | None:
        """The terminal event, once, when no gather runs any more."""
        if self._end is None or self._num_gathers or self._taken:
            return None
        self._taken = True
        return replace(self._end, nbytes=self.nbytes)


@dataclass(slots=True)
class ReceiveTransfer:
    """One transfer on the receiving node; `page_ids` are reserved for sequence pages from `prefix_pages` on.

    `window_ids` are their window pages, 0 where none is reserved; `windows` is that of the KVLayout.
    """

    key: ReqKey
    peer_id: str
    page_ids: list[int]
    prefix_pages: int
    num_layers: int
    page_size: int
    deadline: float
    num_known: int | None = None
    """Of a running request that moves: how many of its tokens were known here when its pages were reserved."""
    windows: tuple[int, ...] = ()
    window_ids: list[int] = field(default_factory=list)
    state: ReceiveState = ReceiveState.RESERVED
    nbytes: int = 0
    _num_offered: int = 0
    _num_without_windows: int = 0
    """How many of the offered pages, the first ones, come without window pages."""
    _num_offered_units: int = 0
    _num_units: int = 0
    _handoff: Handoff | None = None
    _awaits_since: float = 0.0
    _seconds: float = 0.0
    """How long offered pages were awaited. Between offers the sending node computes."""
    _num_scatters: int = 0
    _end: Received | ReceiveFailed | None = None
    _taken: bool = False

    @property
    def ended(self) -> bool:
        """Its outcome is decided."""
        return self.state is ReceiveState.ENDED

    @property
    def has_all_offered(self) -> bool:
        """Whether every offered page has arrived: what comes next has to be computed first."""
        return self._num_units == self._num_offered_units

    @property
    def is_bulk(self) -> bool:
        """Whether its pages may come later than those of others: its request still runs on the sending node."""
        return self.num_known is not None and self._handoff is None

    @property
    def ready(self) -> Ready:
        """What the sending node is told when this transfer starts."""
        num_pages = self.prefix_pages + len(self.page_ids)
        return Ready(self.key, self.prefix_pages, num_pages, self.num_known)

    def start(self, deadline: float) -> None:
        """Ready is being sent: from now on chunks may be scattered into the pages."""
        assert self.state is ReceiveState.RESERVED
        self.state = ReceiveState.RECEIVING
        self.deadline = deadline

    @property
    def _num_full_layers(self) -> int:
        return self.num_layers - sum(window > 0 for window in self.windows)

    def offered(self, first_page: int, num_pages: int, now: float, has_windows: bool = False) -> bool:
        """The sending node holds these pages; False for a repetition. TransferError: they cannot be placed."""
        expected = self.prefix_pages + self._num_offered
        if first_page + num_pages <= expected:
            return False
        if first_page != expected:
            raise TransferError(f"offer of page {first_page} where page {expected} was due")
        if self._num_offered + num_pages > len(self.page_ids):
            raise TransferError(f"offer up to page {first_page + num_pages} exceeds the {self._reserved()}")
        if self._handoff is not None:
            raise TransferError("offer after the handoff")
        at = self._num_offered
        window_ids = self.window_ids[at : at + num_pages]
        if has_windows and not (len(window_ids) == num_pages and all(window_ids)):
            raise TransferError(f"offer of window pages from page {first_page} on, which have no place here")
        if not has_windows and self.windows and self._num_without_windows < at:
            raise TransferError(f"offer of page {first_page} without a window page, behind one that has one")
        if self.has_all_offered:
            self._awaits_since = now
        self._num_offered += num_pages
        if not has_windows:
            self._num_without_windows += num_pages
        self._num_offered_units += num_pages * (self.num_layers if has_windows else self._num_full_layers)
        return True

    def handed_off(self, handoff: Handoff) -> None:
        """The record of the sequence; it comes after the last offer, so all counts must agree now."""
        if self._handoff is not None:
            return
        kv_pages = -(-handoff.kv_len // self.page_size)
        offered = self.prefix_pages + self._num_offered
        if handoff.total_pages != kv_pages:
            raise TransferError(f"handoff of {handoff.total_pages} pages for {handoff.kv_len} tokens")
        if handoff.total_pages > self.prefix_pages + len(self.page_ids):
            raise TransferError(f"handoff of {handoff.total_pages} pages exceeds the {self._reserved()}")
        if handoff.total_pages != offered:
            raise TransferError(f"handoff of {handoff.total_pages} pages after offers of {offered}")
        first_seen = first_window_page(handoff.kv_len, max(self.windows, default=0), self.page_size)
        if self.windows and self._num_without_windows > max(first_seen - self.prefix_pages, 0):
            raise TransferError(
                f"handoff of {handoff.kv_len} tokens, of which page {first_seen} is the first in the window; "
                f"window pages came from page {self.prefix_pages + self._num_without_windows} on"
            )
        self._handoff = handoff

    def begin_scatter(self, chunk: Chunk) -> list[int] | None:
        """Pages to write, or None when the transfer has ended and the chunk is to be dropped."""
        if self.state is not ReceiveState.RECEIVING:
            return None
        self._num_scatters += 1
        first = chunk.first_page - self.prefix_pages
        page_ids = self.window_ids if chunk.first_layer >= self._num_full_layers else self.page_ids
        return page_ids[first : first + chunk.num_pages]

    def end_scatter(self, chunk: Chunk, nbytes: int, now: float) -> None:
        """The data thread no longer writes to the pages that `begin_scatter` named."""
        self._num_scatters -= 1
        self._num_units += chunk.units
        self.nbytes += nbytes
        if self.has_all_offered:
            self._seconds += now - self._awaits_since

    def complete(self) -> bool:
        """End with success if the handoff and every page of every layer is there."""
        if self.state is not ReceiveState.RECEIVING or self._handoff is None:
            return False
        if not self.has_all_offered:
            return False
        self.state = ReceiveState.ENDED
        self._end = Received(
            self.key, self.peer_id, self._handoff, self.nbytes, self._num_offered, self._seconds
        )
        return True

    def fail(self, reason: str, *, by_peer: bool, handed_off: bool = False, corrupt: bool = False) -> bool:
        """Decide that the transfer has failed; False when its outcome had been decided before.

        `handed_off`: the sending node had sent its Handoff, whether or not that has come.
        """
        if self.state is ReceiveState.ENDED:
            return False
        self.state = ReceiveState.ENDED
        handed_off |= self._handoff is not None
        self._end = ReceiveFailed(self.key, reason, by_peer, handed_off, self.peer_id, corrupt)
        return True

    def take_end(self) -> Received | ReceiveFailed | None:
        """The terminal event, once, when no scatter runs any more."""
        if self._end is None or self._num_scatters or self._taken:
            return None
        self._taken = True
        return self._end

    def _reserved(self) -> str:
        return f"{len(self.page_ids)} pages reserved from page {self.prefix_pages} on"
