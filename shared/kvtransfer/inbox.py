"""Messages that name a transfer: one that is open, one that is not open yet, or one that has ended.

Nothing here reads a clock: `now` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.kvtransfer.links import Endpoint
from shared.protocol.messages import ReqKey, Struct
from shared.protocol.transfer_messages import CancelTransfer


class Keyed(Protocol):
    """A message about one transfer."""

    @property
    def key(self) -> ReqKey:
        """Names the transfer."""
        ...


class Opened(Protocol):
    """A transfer of this side, with one peer."""

    key: ReqKey
    peer_id: str


Answer = TypeVar("Answer")
Message = TypeVar("Message", bound=Keyed)
Parked = TypeVar("Parked")
Transfer = TypeVar("Transfer", bound=Opened)


class Tombstones(Generic[Answer]):
    """Keys that have ended, so that a late message cannot reopen one; each with the answer to such a message."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._ended: OrderedDict[ReqKey, tuple[float, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._ended

    def get(self, key: ReqKey) -> Answer | None:
        """The answer for `key`; None when it has not ended, or so long ago that it is forgotten."""
        ended = self._ended.get(key)
        return None if ended is None else ended[1]

    def add(self, key: ReqKey, answer: Answer, now: float) -> None:
        """Remember that `key` has ended."""
        self._ended[key] = (now + self._ttl_s, answer)
        if len(self._ended) > self._max_keys:
            self._ended.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget the keys whose time is over; all have the same time to live, so the oldest come first."""
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._ended.popitem(last=False)


@dataclass(slots=True)
class _ParkedKey(Generic[Parked]):
    expires: float
    messages: list[Parked]


class Parking(Generic[Parked]):
    """Messages whose key is not open here yet, in order of arrival; bounded in keys and in messages per key."""

    MAX_PER_KEY = 1024

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._keys: OrderedDict[tuple[ReqKey, str], _ParkedKey[Parked]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def park(self, key: ReqKey, peer_id: str, message: Parked, now: float) -> tuple[str, ReqKey] | None:
        """Keep a message. Returns the (peer, key) that had to leave for it, if any, for the caller to cancel."""
        parked = self._keys.get((key, peer_id))
        if parked is not None:
            if len(parked.messages) < self.MAX_PER_KEY:
                parked.messages.append(message)
            return None
        self._keys[key, peer_id] = _ParkedKey(now + self._ttl_s, [message])
        if len(self._keys) <= self._max_keys:
            return None
        (old_key, old_peer), _ = self._keys.popitem(last=False)
        return old_peer, old_key

    def take(self, key: ReqKey, peer_id: str) -> list[Parked]:
        """The messages that `peer_id` sent for `key`, which is open now."""
        parked = self._keys.pop((key, peer_id), None)
        return [] if parked is None else parked.messages

    def expire(self, now: float) -> list[tuple[str, ReqKey]]:
        """Drop the keys that were not opened in time, and return each (peer, key) for the caller to cancel."""
        expired = []
        while self._keys and next(iter(self._keys.values())).expires <= now:
            (key, peer_id), _ = self._keys.popitem(last=False)
            expired.append((peer_id, key))
        return expired

    def drop_peer(self, peer_id: str) -> None:
        """Drop the messages of a peer that is gone."""
        for place in [place for place in self._keys if place[1] == peer_id]:
            del self._keys[place]


class KeyedInbox(Generic[Transfer, Message, Answer]):
    """The open transfers of one side, and the messages that name a transfer. Used under the lock of the side.

    A message of an open transfer goes to `apply`, if its peer is the transfer's. One whose key is not open yet is
    parked until it is, or answered with a cancel. One whose key has ended is answered with what `answer_late` makes
    of it and of the key's tombstone. Each key is opened once, and closed once.
    """

    def __init__(
        self,
        *,
        own: Endpoint,
        apply: Callable[[Transfer, Message], None],
        answer_late: Callable[[Message, Answer], Struct | None],
        node: str,
    ) -> None:
        options = own.options
        self._outbox = own.outbox
        self._apply = apply
        self._answer_late = answer_late
        self._node = node
        """What this node is called in what the peer is told."""
        self._open: dict[ReqKey, Transfer] = {}
        self._tombstones: Tombstones[Answer] = Tombstones(options.tombstone_s, options.max_tombstones)
        self._parking: Parking[Message] = Parking(options.park_s, options.max_parked)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Transfer]:
        """The open transfers, of which any may be closed meanwhile."""
        return iter(list(self._open.values()))

    def open(self, transfer: Transfer) -> None:
        """Give later messages with its key to `transfer`; `take_parked` applies those that came before."""
        key = transfer.key
        assert key not in self._open and key not in self._tombstones, f"{key} opened twice"
        self._open[key] = transfer

    def take_parked(self, transfer: Transfer) -> None:
        """Apply what came for `transfer` before it was opened."""
        for message in self._parking.take(transfer.key, transfer.peer_id):
            self._apply(transfer, message)

    def get(self, key: ReqKey) -> Transfer | None:
        """The open transfer of `key`."""
        return self._open.get(key)

    def ended(self, key: ReqKey) -> Answer | None:
        """The tombstone of `key`."""
        return self._tombstones.get(key)

    def of_peer(self, peer_id: str) -> list[Transfer]:
        """The open transfers with this peer."""
        return [transfer for transfer in self._open.values() if transfer.peer_id == peer_id]

    def close(self, key: ReqKey, answer: Answer, now: float) -> None:
        """End a transfer; `answer` is kept for late messages."""
        del self._open[key]
        self._tombstones.add(key, answer, now)

    def receive(self, peer_id: str, message: Message, now: float) -> None:
        """Handle a message of `peer_id`."""
        transfer = self._open.get(message.key)
        if transfer is not None:
            if transfer.peer_id == peer_id:
                self._apply(transfer, message)
            return
        tombstone = self._tombstones.get(message.key)
        if tombstone is not None:
            answer = self._answer_late(message, tombstone)
            if answer is not None:
                self._outbox.send(peer_id, answer)
            return
        evicted = self._parking.park(message.key, peer_id, message, now)
        if evicted is not None:
            self._cancel(*evicted, f"too many transfers wait for their request at the {self._node}")

    def drop_peer(self, peer_id: str) -> None:
        """Drop what a peer announced that is gone."""
        self._parking.drop_peer(peer_id)

    def expire(self, now: float) -> None:
        """Cancel what was parked for too long, and forget old tombstones."""
        for peer_id, key in self._parking.expire(now):
            self._cancel(peer_id, key, f"the request never came to the {self._node}")
        self._tombstones.expire(now)

    def _cancel(self, peer_id: str, key: ReqKey, reason: str) -> None:
        self._outbox.send(peer_id, CancelTransfer(key, reason))
