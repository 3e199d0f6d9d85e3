from __future__ import annotations

from shared.kvtransfer.inbox import Parking, Tombstones
from tests.unit.kvtransfer.world import key


def test_tombstones_are_forgotten_in_time_and_bounded_in_number() -> None:
    stones: Tombstones[str] = Tombstones(ttl_s=10, max_keys=2)
    stones.add(key(0), "a", now=0)
    stones.add(key(1), "b", now=5)
    assert stones.get(key(0)) == "a"
    stones.expire(9.9)
    assert key(0) in stones
    stones.expire(10)
    assert key(0) not in stones
    assert stones.get(key(1)) == "b"
    stones.add(key(2), "c", now=11)
    stones.add(key(3), "d", now=11)
    assert len(stones) == 2
    assert key(1) not in stones


def test_parked_messages_keep_their_order_and_their_sender() -> None:
    parking: Parking[str] = Parking(ttl_s=10, max_keys=10)
    parking.park(key(0), "p0", "first", 0)
    parking.park(key(0), "p0", "second", 5)
    parking.park(key(0), "p1", "of another", 5)
    assert parking.take(key(0), "p0") == ["first", "second"]
    assert parking.take(key(0), "p0") == []
    assert parking.take(key(0), "p1") == ["of another"]
    assert len(parking) == 0


def test_parked_messages_expire_and_say_who_wants_an_answer() -> None:
    parking: Parking[str] = Parking(ttl_s=10, max_keys=10)
    parking.park(key(0), "p0", "x", 0)
    parking.park(key(1), "p0", "x", 1)
    parking.park(key(0), "p0", "y", 9)  # the first message of a key counts
    assert parking.expire(9.9) == []
    assert parking.expire(10) == [("p0", key(0))]
    assert parking.expire(20) == [("p0", key(1))]


def test_parking_is_bounded_in_keys_and_in_messages_of_a_key() -> None:
    parking: Parking[int] = Parking(ttl_s=10, max_keys=2)
    assert parking.park(key(0), "p0", 0, 0) is None
    assert parking.park(key(1), "p0", 0, 0) is None
    assert parking.park(key(2), "p0", 0, 0) == ("p0", key(0))
    for number in range(3000):
        parking.park(key(2), "p0", number, 0)
    assert len(parking.take(key(2), "p0")) == Parking.MAX_PER_KEY
    parking.drop_peer("p0")
    assert len(parking) == 0
