from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared.kvtransfer.side import KeyedInbox, Remembered
from shared.kvtransfer.states import SendTransfer
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Ready
from tests.unit.kvtransfer.world import FAST, World, key


def test_what_is_remembered_is_forgotten_in_time_and_bounded_in_number() -> None:
    stones: Remembered[ReqKey, str] = Remembered(ttl_s=10, max_keys=2)
    stones.add(key(0), "a", now=0)
    stones.add(key(1), "b", now=5)
    assert stones.get(key(0)) == "a"
    assert stones.expire(9.9) == []
    assert stones.expire(10) == [key(0)]
    assert stones.get(key(0)) is None
    assert stones.get(key(1)) == "b"
    assert stones.add(key(2), "c", now=11) is None
    assert stones.add(key(3), "d", now=11) == key(1)
    assert stones.pop(key(2)) == "c" and stones.pop(key(2)) is None


def test_parked_messages_keep_their_order_and_their_sender_and_are_bounded() -> None:
    own, applied = World(options=replace(FAST, max_parked=4)).p.side._own, list[Any]()
    inbox: KeyedInbox[SendTransfer, Ready, str] = KeyedInbox(
        own=own,
        apply=lambda transfer, message: applied.append(message),
        answer_late=lambda message, answer: None,
        called="node",
    )
    for number in range(3000):
        inbox.receive("d0", Ready(key(0), number, 0), now=0)
    inbox.receive("d1", Ready(key(0), 9999, 0), now=0)
    inbox.receive("d0", Ready(key(1), 0, 0), now=0)
    inbox.drop_peer("d1")
    for number, peer in ((0, "d1"), (0, "d0"), (1, "d0")):
        inbox.take_parked(SendTransfer(key(number), peer, 1, 0.0, None))
    num_parked = KeyedInbox.MAX_PARKED_PER_KEY
    assert applied == [*(Ready(key(0), number, 0) for number in range(num_parked)), Ready(key(1), 0, 0)]
