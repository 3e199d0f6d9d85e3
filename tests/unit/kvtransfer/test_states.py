"""The states of one transfer."""

from __future__ import annotations

import pytest

from shared.errors import TransferError
from shared.kvtransfer.staging import Chunk
from shared.kvtransfer.states import Received, ReceiveTransfer, SendEnded, SendTransfer
from shared.protocol.messages import ReqKey
from shared.protocol.transfer_messages import Handoff


def test_seconds_count_only_while_offered_pages_are_awaited() -> None:
    """From 1 to 3 and from 10 to 11; between them the sending node computes the second page."""
    key = ReqKey("router", "1")
    transfer = ReceiveTransfer(key, "p0", [1, 2], 0, 1, 4, 0.0)
    transfer.start(0.0)
    for page, (offered_at, arrived_at) in enumerate([(1.0, 3.0), (10.0, 11.0)]):
        assert transfer.offered(page, 1, offered_at)
        chunk = Chunk(page, 1, 0, 1)
        assert transfer.begin_scatter(chunk) == [page + 1]
        transfer.end_scatter(chunk, 100, arrived_at)
    transfer.handed_off(Handoff(key, 2, (5,), kv_len=8, digest=0, cached_tokens=0, stamps=()))
    assert transfer.complete()
    end = transfer.take_end()
    assert isinstance(end, Received) and (end.nbytes, end.pages, end.seconds) == (200, 2, 3.0)


def sent(ends_at: float, *, ok: bool, num_read: int = 2) -> SendEnded:
    """Two pages are offered at 1 and 10, the second after it was computed, and read within half a second."""
    key = ReqKey("router", "1")
    transfer = SendTransfer(key, "d0", 1, 0.0, None)
    transfer.ready(0)
    for page, offered_at in enumerate([1.0, 10.0]):
        assert transfer.offer([page + 1], offered_at) == page
        if page < num_read:
            chunk = Chunk(page, 1, 0, 1)
            assert transfer.begin_gather(chunk) == [page + 1]
            transfer.end_gather(chunk, 100, offered_at + 0.5)
    if ok:
        transfer.handoff(2, 100.0)
    assert transfer.end(ok=ok, reason="", now=ends_at)
    end = transfer.take_end()
    assert end is not None and end.nbytes == 100 * num_read
    return end


def test_a_sender_counts_no_time_in_which_pages_are_computed() -> None:
    """Of the first page half a second. The last one has arrived when the receiving node says so, at 12."""
    assert sent(12.0, ok=True).seconds == 0.5 + 2.0


def test_a_sender_whose_transfer_fails_counts_the_time_too() -> None:
    assert sent(40.0, ok=False).seconds == 0.5 + 0.5
    assert sent(40.0, ok=False, num_read=1).seconds == 0.5 + 30.0


def test_time_in_which_several_offers_are_on_their_way_counts_once() -> None:
    """From the first offer, at 1, until the receiving node has both pages, at 6."""
    transfer = SendTransfer(ReqKey("router", "1"), "d0", 1, 0.0, None)
    transfer.ready(0)
    for page, offered_at in enumerate([1.0, 2.0]):
        transfer.offer([page + 1], offered_at)
    for page, read_at in enumerate([3.0, 5.0]):
        transfer.begin_gather(Chunk(page, 1, 0, 1))
        transfer.end_gather(Chunk(page, 1, 0, 1), 100, read_at)
    transfer.handoff(2, 100.0)
    assert transfer.end(ok=True, reason="", now=6.0)
    end = transfer.take_end()
    assert end is not None and end.seconds == 5.0


def test_a_move_is_in_no_hurry_until_its_request_has_stopped() -> None:
    key = ReqKey("router", "1")
    transfer = ReceiveTransfer(key, "d0", [1], 0, 1, 4, 0.0, num_known=3)
    transfer.start(0.0)
    transfer.offered(0, 1, 0.0)
    assert transfer.is_bulk
    transfer.handed_off(Handoff(key, 1, (5,), kv_len=4, digest=0, cached_tokens=0, stamps=()))
    assert not transfer.is_bulk


def windowed_transfer() -> ReceiveTransfer:
    """Of two layers, the second with a window of 9 tokens. Window pages are reserved from the third page on."""
    pages, windows = [11, 12, 13, 14, 15], [0, 0, 3, 4, 5]
    transfer = ReceiveTransfer(
        ReqKey("router", "1"), "p0", pages, 1, 2, 4, 0.0, windows=(0, 9), window_ids=windows
    )
    transfer.start(0.0)
    return transfer


def test_window_pages_come_from_one_page_on() -> None:
    """Each group of layers has its own pages, and what came without window pages is whole without them."""
    transfer = windowed_transfer()
    assert transfer.offered(1, 2, 0.0) and transfer.offered(3, 3, 0.0, has_windows=True)
    for chunk, pages in ((Chunk(1, 5, 0, 1), [11, 12, 13, 14, 15]), (Chunk(3, 3, 1, 1), [3, 4, 5])):
        assert not transfer.has_all_offered
        assert transfer.begin_scatter(chunk) == pages
        transfer.end_scatter(chunk, 100, 1.0)
    transfer.handed_off(Handoff(transfer.key, 6, (5,), kv_len=23, digest=0, cached_tokens=0, stamps=()))
    assert transfer.complete(), "token 23 sees tokens from 15 on, in page 3"


def test_a_transfer_without_the_window_before_its_end_fails() -> None:
    transfer = windowed_transfer()
    transfer.offered(1, 4, 0.0)
    transfer.offered(5, 1, 0.0, has_windows=True)
    handoff = Handoff(transfer.key, 6, (5,), kv_len=24, digest=0, cached_tokens=0, stamps=())
    with pytest.raises(TransferError, match=r"page 4 .*page 5"):
        transfer.handed_off(handoff)


def test_window_pages_that_have_no_place_or_end_are_refused() -> None:
    transfer = windowed_transfer()
    transfer.offered(1, 1, 0.0)
    with pytest.raises(TransferError, match="page 2 "):
        transfer.offered(2, 4, 0.0, has_windows=True)
    transfer.offered(2, 1, 0.0)
    transfer.offered(3, 1, 0.0, has_windows=True)
    with pytest.raises(TransferError, match="page 4 without"):
        transfer.offered(4, 1, 0.0)


def test_a_grant_of_window_pages_that_were_not_offered_is_void() -> None:
    transfer = SendTransfer(ReqKey("router", "1"), "d0", 2, 0.0, None, num_window_layers=1)
    transfer.ready(0)
    transfer.offer([11, 12], 0.0)
    transfer.offer([13], 0.0, [3])
    assert transfer.begin_gather(Chunk(2, 1, 1, 1)) == [3] and transfer.begin_gather(Chunk(2, 1, 0, 1)) == [
        13
    ]
    assert transfer.begin_gather(Chunk(1, 2, 1, 1)) is None


def test_pages_without_a_layer_to_send_take_no_time() -> None:
    """All layers have windows, which the page that was offered at 5 is before."""
    transfer = SendTransfer(ReqKey("router", "1"), "d0", 1, 0.0, None, num_window_layers=1)
    transfer.ready(0)
    transfer.offer([1], 5.0)
    transfer.offer([2], 10.0, [3])
    chunk = Chunk(1, 1, 0, 1)
    assert transfer.begin_gather(chunk) == [3]
    transfer.end_gather(chunk, 100, 10.5)
    transfer.handoff(2, 100.0)
    assert transfer.end(ok=True, reason="", now=12.0)
    end = transfer.take_end()
    assert end is not None and end.seconds == 2.0
