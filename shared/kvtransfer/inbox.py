"""Messages that name a transfer: one that is open, one that is not open yet, or one that has ended.

Nothing here reads a clock: `now` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.states import ReceiveTransfer, SendTransfer
from shared.protocol.messages import ReqKey, Struct
from shared.protocol.transfer_messages import CancelTransfer, Done, Handoff, Offer, Ready

Answer = TypeVar("Answer")
Message = TypeVar("Message", bound=Ready | Done | Offer | Handoff | CancelTransfer)
Transfer = TypeVar("Transfer", bound=SendTransfer | ReceiveTransfer)
Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Values that are forgotten after `ttl_s`, and of which there are `max_keys` at most."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        """Each with when it expires. All live equally long, so the oldest come first."""

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._values))

    def get(self, key: Key) -> Value | None:
        """The value of `key`, while it is remembered."""
        remembered = self._values.get(key)
        return None if remembered is None else remembered[1]

    def add(self, key: Key, value: Value, now: float) -> Key | None:
        """Remember `value`. Returns the key that had to leave for it, if any."""
        self._values[key] = (now + self._ttl_s, value)
        return self._values.popitem(last=False)[0] if len(self._values) > self._max_keys else None

    def pop(self, key: Key) -> Value | None:
        """Forget `key`, and return its value."""
        return self._values.pop(key, (0.0, None))[1]

    def expire(self, now: float) -> list[Key]:
        """Forget what is too old. Returns its keys."""
        expired = []
        while self._values and next(iter(self._values.values()))[0] <= now:
            expired.append(self._values.popitem(last=False)[0])
        return expired


class KeyedInbox(Generic[Transfer, Message, Answer]):
    """The open transfers of one side, and the messages that name a transfer. Used under the lock of the side.

    A message of an open transfer goes to `apply`, if its peer is the transfer's. One whose key is not open yet is
    parked until it is, or answered with a cancel. One whose key has ended is answered with what `answer_late` makes
    of it and of the key's tombstone. Each key is opened once, and closed once.
    """

    MAX_PARKED_PER_KEY = 1024

    def __init__(
        self,
        *,
        own: Endpoint,
        apply: Callable[[Transfer, Message], None],
        answer_late: Callable[[Message, Answer], Struct | None],
        called: str,
    ) -> None:
        options = own.options
        self._outbox = own.outbox
        self._apply = apply
        self._answer_late = answer_late
        self._called = called
        """What this node is called in what the peer is told."""
        self._open: dict[ReqKey, Transfer] = {}
        self._tombstones: Remembered[ReqKey, Answer] = Remembered(options.tombstone_s, options.max_tombstones)
        """Keys that have ended, so that a late message cannot reopen one; each with the answer to such a message."""
        self._parked: Remembered[tuple[ReqKey, str], list[Message]] = Remembered(
            options.park_s, options.max_parked
        )
        """By key and peer, messages whose key is not open here yet, in order of arrival."""

    def __iter__(self) -> Iterator[Transfer]:
        """The open transfers, of which any may be closed meanwhile."""
        return iter(list(self._open.values()))

    def open(self, transfer: Transfer) -> None:
        """Give later messages with its key to `transfer`; `take_parked` applies those that came before."""
        key = transfer.key
        assert key not in self._open and self.ended(key) is None, f"{key} opened twice"
        self._open[key] = transfer

    def take_parked(self, transfer: Transfer) -> None:
        """Apply what came for `transfer` before it was opened."""
        for message in self._parked.pop((transfer.key, transfer.peer_id)) or ():
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
        tombstone, place = self.ended(message.key), (message.key, peer_id)
        if tombstone is not None:
            answer = self._answer_late(message, tombstone)
            if answer is not None:
                self._outbox.send(peer_id, answer)
        elif (parked := self._parked.get(place)) is not None:
            if len(parked) < self.MAX_PARKED_PER_KEY:
                parked.append(message)
        elif (evicted := self._parked.add(place, [message], now)) is not None:
            self._cancel(*evicted, f"too many transfers wait for their request at the {self._called}")

    def drop_peer(self, peer_id: str) -> None:
        """Drop what a peer announced that is gone."""
        for place in self._parked:
            if place[1] == peer_id:
                self._parked.pop(place)

    def expire(self, now: float) -> None:
        """Cancel what was parked for too long, and forget old tombstones."""
        for place in self._parked.expire(now):
            self._cancel(*place, f"the request never came to the {self._called}")
        self._tombstones.expire(now)

    def _cancel(self, key: ReqKey, peer_id: str, reason: str) -> None:
        self._outbox.send(peer_id, CancelTransfer(key, reason))
