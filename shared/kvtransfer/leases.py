"""Bookkeeping by deadline: keys that have ended, messages that came too early, and peers that may be silent.

Nothing here reads a clock: `now` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.protocol.messages import ReqKey

Epitaph = TypeVar("Epitaph")
Message = TypeVar("Message")


class Tombstones(Generic[Epitaph]):
    """Keys that have ended, so that a late message cannot reopen one; each with what to answer such a message."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._graves: OrderedDict[ReqKey, tuple[float, Epitaph]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def __contains__(self, key: ReqKey) -> bool:
        return key in self._graves

    def get(self, key: ReqKey) -> Epitaph | None:
        """How `key` ended; None when it has not, or so long ago that it is forgotten."""
        grave = self._graves.get(key)
        return None if grave is None else grave[1]

    def bury(self, key: ReqKey, epitaph: Epitaph, now: float) -> None:
        """Remember that `key` has ended."""
        self._graves[key] = (now + self._ttl_s, epitaph)
        if len(self._graves) > self._max_keys:
            self._graves.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget the keys whose time is over; all have the same time to live, so the oldest come first."""
        while self._graves and next(iter(self._graves.values()))[0] <= now:
            self._graves.popitem(last=False)


@dataclass(slots=True)
class _Lot(Generic[Message]):
    peer_id: str
    expires: float
    messages: list[Message]


class Parking(Generic[Message]):
    """Messages whose key is not open here yet, in order of arrival; bounded in keys and in messages per key."""

    MAX_PER_KEY = 1024

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._lots: OrderedDict[tuple[ReqKey, str], _Lot[Message]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lots)

    def park(self, key: ReqKey, peer_id: str, message: Message, now: float) -> tuple[str, ReqKey] | None:
        """Keep a message. Returns the (peer, key) that had to leave for it, if any: it wants a cancel."""
        lot = self._lots.get((key, peer_id))
        if lot is not None:
            if len(lot.messages) < self.MAX_PER_KEY:
                lot.messages.append(message)
            return None
        self._lots[key, peer_id] = _Lot(peer_id, now + self._ttl_s, [message])
        if len(self._lots) <= self._max_keys:
            return None
        (old_key, old_peer), _ = self._lots.popitem(last=False)
        return old_peer, old_key

    def take(self, key: ReqKey, peer_id: str) -> list[Message]:
        """The messages that `peer_id` sent for `key`, which is open now."""
        lot = self._lots.pop((key, peer_id), None)
        return [] if lot is None else lot.messages

    def expire(self, now: float) -> list[tuple[str, ReqKey]]:
        """Drop what nobody came for; each (peer, key) of it wants a cancel."""
        expired = []
        while self._lots and next(iter(self._lots.values())).expires <= now:
            (key, peer_id), _ = self._lots.popitem(last=False)
            expired.append((peer_id, key))
        return expired

    def drop_peer(self, peer_id: str) -> None:
        """The peer is gone: what it announced will not come."""
        for place in [place for place in self._lots if place[1] == peer_id]:
            del self._lots[place]


class Heartbeat:
    """Decides when to ping one peer, and when it counts as silent.

    Silence is measured from pings that went unanswered and not from the wall clock alone: a node that was
    itself asleep (a long step, a stopped process) wakes to a backlog of answers and must not condemn the peer
    before it has read them.
    """

    MIN_UNANSWERED = 2

    def __init__(self, ping_s: float, timeout_s: float, now: float) -> None:
        self._ping_s = ping_s
        self._timeout_s = timeout_s
        self._heard_at = now
        self._ping_at = now
        self._num_unanswered = 0

    def heard(self, now: float) -> None:
        """Any message of the peer proves that its Python is alive."""
        self._heard_at = now
        self._num_unanswered = 0

    def silence(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return now - self._heard_at

    def ping_due(self, now: float) -> bool:
        """Whether to send a ping now; counts it as sent."""
        if now < self._ping_at:
            return False
        self._ping_at = now + self._ping_s
        self._num_unanswered += 1
        return True

    def silent(self, now: float) -> bool:
        """To be asked before `ping_due`, so that the last ping had its time to be answered."""
        return (
            now >= self._ping_at
            and self._num_unanswered >= self.MIN_UNANSWERED
            and self.silence(now) >= self._timeout_s
        )
