from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError

from shared.kvtransfer.link_store import LinkStore
from tests.patience import PATIENCE_S


def two(timeout_s: float = PATIENCE_S) -> tuple[LinkStore, LinkStore]:
    def to_b(name: str, value: bytes) -> None:
        b.feed(name, value)

    def to_a(name: str, value: bytes) -> None:
        a.feed(name, value)

    a, b = LinkStore(to_b, timeout_s), LinkStore(to_a, timeout_s)
    return a, b


def test_what_one_end_sets_both_ends_get() -> None:
    a, b = two()
    a.set("0/0", b"address")
    a.set("text", "words")
    assert a.get("0/0") == b.get("0/0") == b"address"
    assert b.get("text") == b"words"
    assert b.check(["0/0", "text"])
    assert not b.check(["0/0", "1/0"])


def test_get_waits_for_the_peer() -> None:
    a, b = two()
    threading.Timer(0.05, lambda: b.set("late", b"x")).start()
    assert a.get("late") == b"x"


def test_a_wait_that_is_not_answered_names_the_key() -> None:
    a, _ = two(timeout_s=0.05)
    with pytest.raises(DistStoreError, match="never"):
        a.get("never")
    a, _ = two(timeout_s=60)
    with pytest.raises(DistStoreError, match="never"):
        a.wait(["never"], timedelta(seconds=0.05))


def test_abort_ends_a_wait_at_once() -> None:
    a, _ = two()
    threading.Timer(0.05, lambda: a.abort("the link was given up")).start()
    with pytest.raises(DistStoreError, match="given up"):
        a.get("never")


def test_a_peer_cannot_fill_the_memory() -> None:
    a, _ = two()
    assert not a.feed("big", bytes(LinkStore.MAX_VALUE_NBYTES + 1))
    for number in range(LinkStore.MAX_ENTRIES):
        assert a.feed(str(number), b"x")
    assert not a.feed("one more", b"x")
